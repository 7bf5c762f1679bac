"""Padding of a microbatch to the multiples that parallelism asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_recipes.policy.alignment import Alignment


@dataclass(frozen=True)
class Padded:
    """T' tokens of S' sequences, of which T are real; everything lies on the CPU."""

    token_ids: Tensor  # int64 [T'], padding is token 0
    lengths: Tensor  # int64 [S']
    first: Tensor  # bool [T'], the first token of a sequence
    real: Tensor | None  # int64 [T], where the real tokens lie; None where nothing was padded


def pad(token_ids: Tensor, lengths: Tensor, alignment: Alignment) -> Padded:
    """token_ids: int64 [T]; lengths: int64 [S], sum T. A causal model's real tokens do not see what is put after them."""
    padded = (lengths + alignment.sequence - 1) // alignment.sequence * alignment.sequence
    fill = -int(padded.sum()) % alignment.pack
    if fill:
        padded = torch.cat((padded, torch.tensor([fill])))
    starts = padded.cumsum(0) - padded
    total = int(padded.sum())
    first = torch.zeros(total, dtype=torch.bool)
    first[starts] = True
    if total == len(token_ids):
        return Padded(token_ids, padded, first, None)
    shift = starts[: len(lengths)] - (lengths.cumsum(0) - lengths)
    real = torch.arange(len(token_ids)) + shift.repeat_interleave(lengths)
    return Padded(token_ids.new_zeros(total).index_copy_(0, real, token_ids), padded, first, real)
