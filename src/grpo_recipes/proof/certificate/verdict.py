"""What one layout differed by, and whether that is allowed. Plain numbers: no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from grpo_recipes.proof.certificate.tolerances import Tolerances

Cut = Literal["packed", "unpacked"]
CUTS: tuple[Cut, ...] = ("packed", "unpacked")  # many sequences a microbatch, one sequence a microbatch


@dataclass(frozen=True)
class Measured:
    """Differences from the reference, each as proof/certificate/tolerances.py defines it; infinity for what is missing or
    not a number. Tensors by Hugging Face name."""

    loss: float
    logprob: float
    entropy: float
    grad_norm: float
    counts: float  # largest difference of the counts of tokens and clipped tokens; must be 0
    loaded: dict[str, float]  # weights after loading against those of the checkpoint; must be 0
    gradients: dict[str, float]
    weights: dict[str, float]
    seconds: float

    def worst(self, what: Literal["loaded", "gradients", "weights"]) -> tuple[str, float]:
        """Name and difference of the worst tensor."""
        found: dict[str, float] = getattr(self, what)
        return max(found.items(), key=lambda item: item[1])


def of_all_ranks(parts: Sequence[Measured]) -> Measured:
    """The largest differences that any rank found."""

    def largest(what: str) -> dict[str, float]:
        names = dict.fromkeys(name for part in parts for name in getattr(part, what))
        return {name: max(getattr(part, what).get(name, math.inf) for part in parts) for name in names}

    return Measured(
        loss=max(part.loss for part in parts),
        logprob=max(part.logprob for part in parts),
        entropy=max(part.entropy for part in parts),
        grad_norm=max(part.grad_norm for part in parts),
        counts=max(part.counts for part in parts),
        loaded=largest("loaded"),
        gradients=largest("gradients"),
        weights=largest("weights"),
        seconds=max(part.seconds for part in parts),
    )


@dataclass(frozen=True)
class Row:
    """One layout, cut in one way. `measured` is None where its processes failed; `details` holds their tracebacks."""

    layout: str
    processes: int
    cut: Cut
    measured: Measured | None
    failures: tuple[str, ...]  # each names what differs, by how much and what is allowed
    details: str = ""

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        found = {} if self.measured is None else asdict(self.measured)
        return {**asdict(self), "measured": _plain(found), "passed": self.passed}


def failures(found: Measured, allowed: Tolerances) -> Iterator[str]:
    """Everything above its tolerance; of tensors the three worst."""
    if found.counts:
        yield f"the counts of tokens or of clipped tokens differ by {found.counts:g}"
    for name in ("loss", "logprob", "entropy", "grad_norm"):
        difference, limit = getattr(found, name), getattr(allowed, name)
        if not difference <= limit:
            yield f"{name.replace('_', ' ')} differs by {difference:.2g}, allowed {limit:g}"
    yield from _tensors("weight as loaded", found.loaded, 0.0)
    yield from _tensors("gradient", found.gradients, allowed.gradient)
    yield from _tensors("weight after three steps", found.weights, allowed.weight)


def _tensors(what: str, differences: Mapping[str, float], limit: float) -> Iterator[str]:
    above = sorted(((d, name) for name, d in differences.items() if not d <= limit), reverse=True)
    for difference, name in above[:3]:
        yield f"{what}: {name} differs by {difference:.2g}, allowed {limit:g}"
    if len(above) > 3:
        yield f"{what}: {len(above) - 3} more tensors differ"


def _plain(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
