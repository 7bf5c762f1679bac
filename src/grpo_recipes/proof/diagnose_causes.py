"""What a change of the trainer leaves of the gap to the sampler, as pure functions of logprobs.

R: generated tokens. The gap is the mean over R of |trainer - sampler logprob|, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Cause = Literal["sampling transform", "stale weights", "kernels", "routing", "precision"]
CAUSES: tuple[Cause, ...] = ("sampling transform", "stale weights", "kernels", "routing", "precision")
ENOUGH = 0.25  # a part that is smaller is not named: what was tried does not explain the gap

Logprobs = NDArray[np.float64]  # [R], natural log


@dataclass(frozen=True)
class Part:
    """explains: the share of the gap, 0 to 1. left: the gap without it, nats."""

    cause: Cause
    what: str
    left: float
    explains: float


def gap(a: Logprobs, b: Logprobs) -> float:
    return float(np.abs(a - b).mean())


def of_change(
    cause: Cause, what: str, sampler: Logprobs, trainer: Logprobs, changed: Logprobs, before: Logprobs | None = None
) -> Part:
    """The trainer's logprobs after a change that makes it do as the sampler is suspected of doing.

    Args:
        before: without the change, if `changed` differs from the trainer in more than that.
    """
    whole, left = gap(sampler, trainer), gap(sampler, changed)
    return Part(cause, what, left, _share(gap(sampler, trainer if before is None else before) - left, whole))


def of_rounding(what: str, sampler: Logprobs, trainer: Logprobs, exact: Logprobs) -> Part:
    """The gap that two programs have which round differently, to the same precision.

    Neither can be made to round as the other, so that only the size can be compared: if the errors of both have the
    size of the trainer's, which is its distance from `exact`, and are independent, they differ by sqrt(2) times that.
    """
    whole = gap(sampler, trainer)
    expected = min(whole, math.sqrt(2) * gap(trainer, exact))
    return Part("precision", what, whole - expected, _share(expected, whole))


def of_coarser(what: str, sampler: Logprobs, trainer: Logprobs, *, rounding: float) -> Part:
    """The gap to a program that computes in fewer bits, whose errors have a mean size of `rounding` nats: of a gap that is
    smaller the same share as of one that is larger by the same factor, since both speak against it."""
    whole = gap(sampler, trainer)
    explains = min(whole / rounding, rounding / whole) if whole > 0 and rounding > 0 else 0.0
    return Part("precision", what, whole * (1 - explains), explains)


def of_routing(what: str, sampler: Logprobs, trainer: Logprobs, rerouted: NDArray[np.bool_]) -> Part:
    """What the gap at tokens that went to other experts exceeds that at the others.

    Args:
        rerouted: [R], whether rounding changed any choice of an expert for the position that the token was drawn at.
    """
    gaps = np.abs(sampler - trainer)
    whole = float(gaps.mean())
    usual = float(gaps[~rerouted].mean()) if not rerouted.all() else 0.0
    excess = max(0.0, float((gaps[rerouted] - usual).sum())) / len(gaps)
    return Part("routing", what, whole - excess, _share(excess, whole))


def largest(parts: Sequence[Part]) -> Part | None:
    """Of the causes' best parts; what other experts make of rounding counts as routing and not as precision, too. None
    if no part is worth naming."""
    best: dict[Cause, float] = {}
    for part in parts:
        best[part.cause] = max(best.get(part.cause, 0.0), part.explains)
    if "routing" in best and "precision" in best:
        best["precision"] -= best["routing"]
    named = max(CAUSES, key=lambda cause: best.get(cause, 0.0))
    if best.get(named, 0.0) < ENOUGH:
        return None
    return max((part for part in parts if part.cause == named), key=lambda part: part.explains)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
