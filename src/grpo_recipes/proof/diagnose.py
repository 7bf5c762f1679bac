"""`nemo-run diagnose`: where the difference between sampler and trainer comes from, on the stored rollouts of a step.

The trainer recomputes the logprobs of these rollouts, first as in the run, then with one thing changed at a time to what
the sampler may have done. What such a change leaves of the gap tells its part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grpo_recipes.errors import UserError
from grpo_recipes.proof.diagnose_causes import (
    Logprobs,
    Part,
    gap,
    largest,
    of_change,
    of_coarser,
    of_rounding,
    of_routing,
)
from grpo_recipes.proof.diagnose_recompute import (
    Precision,
    Recomputed,
    Sequences,
    Trainer,
    by_transformers,
    sequences_of,
    trainer_of,
)
from grpo_recipes.proof.diagnose_weights import Versions
from grpo_recipes.recipe.compose import load_resolved
from grpo_recipes.recipe.schema import PolicyConfig
from grpo_recipes.runs.folder import open_run
from grpo_recipes.runs.rollout_store import FINISH_REASONS, StoredRollouts, read_stored, stored_steps

# Fields of Megatron-Core that choose between implementations of the same function in a forward pass.
SWITCHES = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "persist_layer_norm",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
)
OF_EXPERTS = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
ATTENTIONS = ("eager", "sdpa")


@dataclass(frozen=True)
class Diagnosis:
    step: int
    version: int  # of the trainer's weights
    weights: str  # where they came from
    responses: int
    tokens: int
    gap: float  # mean |trainer - sampler logprob|, nats
    mult_prob_error: float  # mean exp |trainer - sampler logprob|
    parts: tuple[Part, ...]
    untried: tuple[str, ...]  # what this machine or this recipe has no way to change

    @property
    def largest(self) -> Part | None:
        return largest(self.parts)

    def lines(self) -> Iterator[str]:
        yield f"step {self.step}: {self.responses} responses, {self.tokens} tokens, weights {self.version} ({self.weights})"
        yield (
            f"mean |trainer - sampler logprob| {self.gap:.3g} nats, token_mult_prob_error {self.mult_prob_error:.6g}"
        )
        yield ""
        width = max([len(part.what) for part in self.parts], default=0)
        yield f"{'part':<18}  {'the trainer with':<{width}}  {'left, nats':>10}  explains"
        for part in self.parts:
            yield f"{part.cause:<18}  {part.what:<{width}}  {part.left:>10.3g}  {part.explains:>8.0%}"
        yield from (f"not tried: {what}" for what in self.untried)
        yield ""
        found = self.largest
        yield f"largest part: {found.cause} ({found.what})" if found else "largest part: none of these explains the gap"


def diagnose(run_dir: str | Path, step: int | None = None, *, samples: int = 64) -> Diagnosis:
    """Args: step: default, the last whose rollouts are stored. samples: so many responses of it, spread evenly.

    Raises:
        UserError: no such run, no stored rollouts of the step, or no checkpoint with its weights.
    """
    run = open_run(run_dir)
    policy = load_resolved(run.recipe_path).recipe.policy
    if step is None:
        step = (stored_steps(run) or [0])[-1]  # reading says that there are none
    stored = read_stored(run, step)
    sequences = sequences_of(stored, choose(stored, samples))
    with tempfile.TemporaryDirectory() as scratch:
        versions = Versions(run, policy, Path(scratch))
        folder = versions.folder(stored.weight_version)
        with trainer_of(policy, folder) as trainer:
            base = trainer.logprobs(sequences)
            parts = [
                *_transform(trainer, sequences, base),
                *_packing(trainer, sequences, base),
                *_stale(trainer, sequences, base, versions, stored.weight_version),
            ]
            switched = _switchable(trainer)
        untried: list[str] = []
        parts += _switches(policy, folder, sequences, base, switched, untried)
        parts += _outside(policy, folder, sequences, base)
    if policy.generation.temperature == 1:
        untried.append("another temperature: the recipe's is 1")
    return Diagnosis(
        step=step,
        version=stored.weight_version,
        weights=versions.name(stored.weight_version),
        responses=len(sequences.token_ids),
        tokens=len(base),
        gap=gap(sequences.logprobs, base),
        mult_prob_error=float(np.exp(np.abs(sequences.logprobs - base)).mean()),
        parts=tuple(sorted(parts, key=lambda part: -part.explains)),
        untried=tuple(untried),
    )


def choose(stored: StoredRollouts, count: int) -> list[int]:
    """So many whole responses, spread evenly. Raises UserError if there are none."""
    whole = [
        n
        for n, (length, reason) in enumerate(zip(stored.response_lengths, stored.finish_reason, strict=True))
        if length and FINISH_REASONS[reason] != "abort"
    ]
    if not whole:
        raise UserError(f"step {stored.step} has no whole response", where="--step", mend="choose another step")
    count = min(count, len(whole))
    return [whole[len(whole) * n // count] for n in range(count)]


def _transform(trainer: Trainer, sequences: Sequences, base: Logprobs) -> Iterator[Part]:
    """Temperature left out of one side, or put in twice."""
    temperature = trainer.temperature
    if temperature == 1:
        return
    for other, what in ((1.0, "no temperature"), (temperature**2, f"temperature {temperature:g} twice")):
        changed = trainer.logprobs(sequences, temperature=other)
        yield of_change("sampling transform", what, sequences.logprobs, base, changed)


def _packing(trainer: Trainer, sequences: Sequences, base: Logprobs) -> Iterator[Part]:
    changed = trainer.logprobs(sequences, alone=True)
    yield of_change("kernels", "each sequence in a pass of its own", sequences.logprobs, base, changed)


def _stale(trainer: Trainer, sequences: Sequences, base: Logprobs, versions: Versions, version: int) -> Iterator[Part]:
    """Other weights of the run, and those that the tokens say that they were drawn by. Leaves the trainer with others."""
    drawn_by = sorted({int(v) for v in sequences.weight_versions} - {version})
    declared = [v for v in drawn_by if v in versions.known]
    by_version: dict[int, Logprobs] = {version: base}
    for other in dict.fromkeys((*declared, *versions.neighbours(version))):
        trainer.take(versions.folder(other))
        by_version[other] = trainer.logprobs(sequences)
        what = f"weights {other} ({versions.name(other)})"
        yield of_change("stale weights", what, sequences.logprobs, base, by_version[other])
    if drawn_by and declared == drawn_by:
        ordered = sorted(by_version)
        place_R = np.searchsorted(ordered, sequences.weight_versions)
        changed = np.stack([by_version[v] for v in ordered])[place_R, np.arange(len(place_R))]
        yield of_change("stale weights", "the weights each token was drawn by", sequences.logprobs, base, changed)


def _switchable(trainer: Trainer) -> dict[str, bool]:
    """Of Megatron-Core's trainer: the other value of each switch that concerns the model."""
    if trainer.config is None:
        return {}
    names = [name for name in SWITCHES if trainer.config.num_moe_experts or name not in OF_EXPERTS]
    return {name: not getattr(trainer.config, name) for name in names}


def _switches(
    policy: PolicyConfig,
    folder: Path,
    sequences: Sequences,
    base: Logprobs,
    switched: dict[str, bool],
    untried: list[str],
) -> Iterator[Part]:
    """One implementation of Megatron-Core exchanged at a time."""
    for name, value in switched.items():
        what = f"{name} {str(value).lower()}"
        try:
            with trainer_of(policy, folder, **{name: value}) as trainer:
                changed = trainer.logprobs(sequences)
        except UserError as error:
            untried.append(f"{what}: {error.message}")
            continue
        yield of_change("kernels", what, sequences.logprobs, base, changed)


def _outside(policy: PolicyConfig, folder: Path, sequences: Sequences, base: Logprobs) -> Iterator[Part]:
    """transformers as the outside reference, and the trainer in the other precision."""
    temperature, sampler = policy.generation.temperature, sequences.logprobs
    exact = by_transformers(folder, sequences, temperature, "float64")
    yield of_rounding(f"rounding of {policy.precision} on both sides, by its size", sampler, base, exact.logprobs)
    rounded: dict[Precision, Recomputed] = {}
    for attention in reversed(ATTENTIONS):
        same = by_transformers(folder, sequences, temperature, policy.precision, attention)
        yield of_change("kernels", f"transformers' kernels, {attention} attention", sampler, base, same.logprobs)
    rounded[policy.precision] = same
    other: Precision = "float32" if policy.precision == "bfloat16" else "bfloat16"
    rounded[other] = by_transformers(folder, sequences, temperature, other)
    for precision, changed in ((other, rounded[other]), ("float64", exact)):
        # Against the same kernels: what they make of the gap is not the precision's part.
        what = f"transformers' kernels in {precision}"
        yield of_change("precision", what, sampler, base, changed.logprobs, before=same.logprobs)
    if other == "bfloat16":
        what = "rounding of bfloat16 on one side, by its size"
        yield of_coarser(what, sampler, base, rounding=gap(rounded[other].logprobs, exact.logprobs))
    with suppress(UserError), trainer_of(policy.model_copy(update={"precision": other}), folder) as trainer:
        yield of_change("precision", f"its own kernels in {other}", sampler, base, trainer.logprobs(sequences))
    for precision, recomputed in sorted(rounded.items()):
        rerouted = rerouted_tokens(exact, recomputed)
        if rerouted is not None:
            what = f"{precision} against float64: experts of {rerouted.mean():.1%} of tokens differ"
            yield of_routing(what, sampler, base, rerouted)


def rerouted_tokens(exact: Recomputed, rounded: Recomputed) -> NDArray[np.bool_] | None:
    """[R], whether any layer chose other experts; None for a dense model."""
    if exact.experts is None or rounded.experts is None:
        return None
    differ: NDArray[np.bool_] = (exact.experts != rounded.experts).any(axis=(1, 2))
    return differ
