"""Random numbers and the choice of a token, as pure functions over whole batches."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant: torch has no arithmetic on uint64."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def uniform(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Number `position` of the stream `seed`: float64 [B] in [0, 1), from int64 [B] and int64 [B].

    Counter based: it depends on its two arguments only, whatever else is drawn, on whichever device. A stream is
    SplitMix64 started at the mixed seed, so that neighbouring seeds give streams that have nothing in common.
    """
    return _shift_right(_mix(_mix(seeds_B) + (positions_B + 1) * _GOLDEN), 11).double() * 2.0**-53


def draw(logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row, by the inverse of the cumulative distribution of softmax(logits / temperature).

    Args:
        logits_BV: floating [B, V].
        temperatures_B: float32 [B]; 0 takes the most likely token, at temperature 1.
        uniforms_B: float64 [B] in [0, 1).

    Returns:
        int64 [B], the tokens, and float32 [B], the natural log of the probability that each was drawn with.

    Raises:
        FloatingPointError: a row's logits hold NaN or +inf, or are -inf altogether.
    """
    greedy_B = temperatures_B == 0
    scales_B = torch.where(greedy_B, torch.ones_like(temperatures_B), temperatures_B)
    # float32, as the trainer recomputes them; only the running sum over the vocabulary needs more.
    logprobs_BV = torch.log_softmax(logits_BV.float() / scales_B[:, None], dim=-1)
    cumulative_BV = logprobs_BV.double().exp_().cumsum(dim=-1)
    # Against its own total, not 1: rounding leaves no gap at the end into which a number could fall.
    targets_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    drawn_B = torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0].clamp_(max=logits_BV.shape[1] - 1)
    tokens_B = torch.where(greedy_B, logprobs_BV.argmax(dim=-1), drawn_B)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    if not bool(chosen_B.isfinite().all()):
        raise FloatingPointError("the model's logits are not finite: nothing can be drawn from them")
    return tokens_B, chosen_B
