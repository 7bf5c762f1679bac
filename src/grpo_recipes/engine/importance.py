"""Weights that correct for tokens being drawn by one distribution and trained on by another.

The sampler's kernels, its precision or its weights (where it is a step behind) differ from the trainer's. With
d_t = log pi_trainer(t) - log pi_sampler(t), both before the first optimizer step of the batch, an unbiased policy
gradient multiplies each token's loss by exp(d_t). Its variance is bounded by truncation or by masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["none", "token", "sequence", "geometric"]
Bound = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True)
class Correction:
    """How weights are made of d_t. R_s: the generated tokens of sequence s.

    level, the weight before it is bounded:
        none:      1 (only masks)
        token:     exp(d_t)
        sequence:  exp(sum over R_s of d), the same for each token of s
        geometric: exp(mean over R_s of d), the same for each token of s (the sequence ratio of GSPO, arXiv 2507.18071)
    bound:
        None:         as it is
        tis:          min(weight, high) (truncated importance sampling: Ionides, J. Comput. Graph. Stat. 17, 2008)
        icepop:       weight where low <= weight <= high, otherwise 0 (IcePop, arXiv 2510.18855, "double-sided masking");
                      with level sequence or geometric whole sequences are masked
        seq-mask-tis: weight in sequences whose geometric mean lies within [low, high], 0 in others (Liu, Li et al., "When
                      Speed Kills Stability", 2025, geometric-mean sequence masks)
    max_sequence_error: besides, sequences with mean over R_s of exp|d| above it weigh 0.
    """

    level: Level = "token"
    bound: Bound | None = None
    low: float = 0.0
    high: float = float("inf")
    max_sequence_error: float | None = None


def importance_weights(
    trainer_T: Tensor, sampler_T: Tensor, mask_T: Tensor, lengths_S: Tensor, correction: Correction
) -> Tensor:
    """The factor of each token's loss, float32 [T]; 1 off the mask. Sequences lie end to end, each one whole.

    The denominator of the loss does not change with it: what is masked still counts, so that a masked share makes the
    step smaller and never the rest of it larger.

    Args:
        trainer_T, sampler_T: float [T], logprobs; read on the mask only.
        mask_T: bool [T], generated tokens.
        lengths_S: int64 [S].
    """
    d_T = log_ratios(trainer_T, sampler_T, mask_T)
    sum_S, count_S = per_sequence(d_T, lengths_S), per_sequence(mask_T.double(), lengths_S).clamp(min=1)
    mean_S = sum_S / count_S
    exponent_T = {
        "none": torch.zeros_like(d_T),
        "token": d_T,
        "sequence": spread(sum_S, lengths_S),
        "geometric": spread(mean_S, lengths_S),
    }[correction.level]
    weight_T = exponent_T.exp()
    if correction.bound == "tis":
        weight_T = weight_T.clamp(max=correction.high)
    elif correction.bound == "icepop":
        weight_T = torch.where(_within(weight_T, correction), weight_T, 0.0)
    elif correction.bound == "seq-mask-tis":
        weight_T = torch.where(spread(_within(mean_S.exp(), correction), lengths_S), weight_T, 0.0)
    if correction.max_sequence_error is not None:
        error_S = sequence_errors(d_T, mask_T, lengths_S)
        weight_T = torch.where(spread(error_S <= correction.max_sequence_error, lengths_S), weight_T, 0.0)
    return torch.where(mask_T, weight_T, 1.0).float()


def log_ratios(trainer_T: Tensor, sampler_T: Tensor, mask_T: Tensor) -> Tensor:
    """d_t in float64; 0 off the mask."""
    return torch.where(mask_T, trainer_T.double() - sampler_T.double(), 0.0)


def sequence_errors(d_T: Tensor, mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """float64 [S]: mean over a sequence's generated tokens of exp|d|, at least 1; 1 where it has none."""
    count_S = per_sequence(mask_T.double(), lengths_S)
    sum_S = per_sequence(torch.where(mask_T, d_T.abs().exp(), 0.0), lengths_S)
    return torch.where(count_S > 0, sum_S / count_S.clamp(min=1), 1.0)


def per_sequence(values_T: Tensor, lengths_S: Tensor) -> Tensor:
    """float64 [S]: sums over each sequence."""
    sums = torch.zeros(len(lengths_S), dtype=torch.float64)
    return sums.index_add_(0, torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S), values_T)


def spread(values_S: Tensor, lengths_S: Tensor) -> Tensor:
    """[T]: each token its sequence's value."""
    return torch.repeat_interleave(values_S, lengths_S)


def _within(values: Tensor, correction: Correction) -> Tensor:
    return (values >= correction.low) & (values <= correction.high)
