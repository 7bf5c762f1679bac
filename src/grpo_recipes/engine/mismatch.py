"""How far the trainer's logprobs are from the sampler's: sums on each rank, one verdict on the driver."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_recipes.engine.importance import log_ratios, per_sequence, sequence_errors
from grpo_recipes.errors import UserError
from grpo_recipes.policy.contract import Batch
from grpo_recipes.recipe.schema import MismatchLimits

if TYPE_CHECKING:
    from grpo_recipes.engine.parts import StepOutcome

WORST = 5  # sequences that a batch names


@dataclass(frozen=True)
class WorstSequence:
    """sequence: its place in the batch. error: mean over its generated tokens of exp|trainer - sampler logprob|.
    logprobs: float32 [tokens], by the trainer."""

    sequence: int
    error: float
    tokens: int
    logprobs: Tensor


class BatchRefused(UserError):
    """Sampler and trainer are too far apart; the batch is not trained on. The step adds what is to be kept of it."""

    outcome: StepOutcome | None = None


@dataclass(frozen=True)
class MismatchSums:
    """Of one replica's share of a batch; float64 sums over its generated tokens, and counts."""

    tokens: int
    sequences: int
    mult_prob_error: float
    gen_kl_error: float
    policy_kl_error: float
    js_divergence_error: float
    importance_ratio: float
    weight: float
    masked_tokens: int
    masked_sequences: int
    max_difference: float
    max_weight: float
    worst: tuple[WorstSequence, ...]  # numbered as in this share

    def numbered(self, members: Sequence[int]) -> MismatchSums:
        """The same with its sequences' places in the whole batch."""
        return replace(self, worst=tuple(replace(w, sequence=members[w.sequence]) for w in self.worst))


@dataclass(frozen=True)
class Mismatch:
    """Means over the generated tokens of a batch; docs/mismatch.md has the definitions.

    The last four are about the correction (engine/importance.py); without one they say that nothing was corrected.
    """

    token_mult_prob_error: float
    gen_kl_error: float
    policy_kl_error: float
    js_divergence_error: float
    sampling_importance_ratio: float
    logprob_diff_max: float
    sequence_mult_prob_error_max: float
    importance_weight_mean: float
    importance_weight_max: float
    masked_token_fraction: float
    masked_sequence_fraction: float
    worst: tuple[WorstSequence, ...]

    def metrics(self) -> dict[str, float]:
        return {f"train/{field.name}": getattr(self, field.name) for field in fields(self) if field.name != "worst"}


def mismatch_sums(batch: Batch) -> MismatchSums:
    """Of a batch with old_logprobs; with importance_weights where losses are corrected.

    k3(p, q) is exp(q - p) - (q - p) - 1 for the logprobs p of a drawn token and q of the same token elsewhere. As NeMo-RL
    defines them (docs/guides/grpo.md, "Metrics"): gen_kl_error is k3(sampler, trainer), policy_kl_error
    k3(trainer, sampler), js_divergence_error the mean of k3(sampler, m) and k3(trainer, m), m the mixture of both.
    """
    assert batch.old_logprobs is not None
    mask_T, lengths_S = batch.mask, batch.lengths
    d_T = log_ratios(batch.old_logprobs, batch.sampler_logprobs, mask_T)
    d = d_T[mask_T]
    errors_S = sequence_errors(d_T, mask_T, lengths_S)
    drawn_S = per_sequence(mask_T.double(), lengths_S)
    weights = torch.ones_like(d) if batch.importance_weights is None else batch.importance_weights[mask_T].double()
    masked_T = torch.zeros_like(mask_T).masked_scatter(mask_T, weights == 0)
    masked_S = per_sequence(masked_T.double(), lengths_S)
    # Of the mixture m, with the sampler's logprob as zero: log((1 + exp d) / 2).
    m = torch.logaddexp(torch.zeros_like(d), d) - math.log(2)
    old_S, drawn_masks_S = (part.split(lengths_S.tolist()) for part in (batch.old_logprobs, mask_T))
    worst = errors_S.topk(min(WORST, len(errors_S))).indices.tolist()
    return MismatchSums(
        tokens=len(d),
        sequences=int((drawn_S > 0).sum()),
        mult_prob_error=float(d.abs().exp().sum()),
        gen_kl_error=float(_k3(d).sum()),
        policy_kl_error=float(_k3(-d).sum()),
        js_divergence_error=float((_k3(m) + _k3(m - d)).sum() / 2),
        importance_ratio=float(d.exp().sum()),
        weight=float(weights.sum()),
        masked_tokens=int(masked_T.sum()),
        masked_sequences=int(((masked_S == drawn_S) & (drawn_S > 0)).sum()),
        max_difference=float(d.abs().max()) if len(d) else 0.0,
        max_weight=float(weights.max()) if len(d) else 0.0,
        worst=tuple(
            WorstSequence(n, float(errors_S[n]), int(drawn_S[n]), old_S[n][drawn_masks_S[n]])
            for n in worst
            if drawn_S[n]
        ),
    )


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio


def combine(parts: Sequence[MismatchSums]) -> Mismatch:
    """Of all replicas, each named once; sequences are already numbered as in the whole batch."""
    tokens = max(1, sum(part.tokens for part in parts))

    def mean(name: str) -> float:
        return float(sum(getattr(part, name) for part in parts)) / tokens

    def largest(values: Iterable[float]) -> float:
        return max(values, key=lambda value: (math.isnan(value), value))

    # A value that is no number is the worst of all.
    worst = sorted(
        (w for part in parts for w in part.worst), key=lambda w: (not math.isnan(w.error), -w.error, w.sequence)
    )[:WORST]
    return Mismatch(
        token_mult_prob_error=mean("mult_prob_error"),
        gen_kl_error=mean("gen_kl_error"),
        policy_kl_error=mean("policy_kl_error"),
        js_divergence_error=mean("js_divergence_error"),
        sampling_importance_ratio=mean("importance_ratio"),
        logprob_diff_max=largest(part.max_difference for part in parts),
        sequence_mult_prob_error_max=worst[0].error if worst else 1.0,
        importance_weight_mean=mean("weight"),
        importance_weight_max=largest(part.max_weight for part in parts),
        masked_token_fraction=mean("masked_tokens"),
        masked_sequence_fraction=sum(p.masked_sequences for p in parts) / max(1, sum(p.sequences for p in parts)),
        worst=tuple(worst),
    )


def check_limits(mismatch: Mismatch, limits: MismatchLimits, step: int, rows: Sequence[int]) -> list[str]:
    """Warnings about a batch that is about to be trained on.

    Args:
        rows: of the training data, for each sequence of the batch.

    Raises:
        BatchRefused: a value is above what the recipe lets pass, or is not a number.
    """
    worst = ", ".join(f"{rows[w.sequence]} (error {w.error:.3g}, {w.tokens} tokens)" for w in mismatch.worst[:3])
    warnings = []
    for name, limit in limits:
        value = getattr(mismatch, name)
        said = f"step {step}: {name} of sampler and trainer is {value:.4g}, worst for the prompts of rows {worst}"
        if limit.abort is not None and not value <= limit.abort:
            raise BatchRefused(
                f"{said}; the batch was not trained on",
                where=f"loss_fn.mismatch.{name}.abort = {limit.abort:g}",
                mend=f"`nemo-run diagnose RUN --step {step}` says what makes the difference, "
                "`nemo-run report RUN` shows the worst responses",
            )
        if limit.warn is not None and not value <= limit.warn:
            warnings.append(f"{said} (loss_fn.mismatch.{name}.warn = {limit.warn:g})")
    return warnings
