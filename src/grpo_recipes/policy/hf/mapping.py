"""How Hugging Face tensors make up Megatron tensors: merging, splitting, and cutting for tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["copy", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that make it up, in the order in which they merge."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind = "copy"


@dataclass(frozen=True)
class Heads:
    query: int
    groups: int
    width: int


def merge(kind: Kind, parts: Sequence[Tensor], heads: Heads, rows: int) -> Tensor:
    """Hugging Face tensors -> one whole Megatron tensor with `rows` rows.

    qkv: Megatron interleaves by query group: the queries of group 0, its key, its value, then group 1 (so that a cut
    of the rows in equal parts gives each tensor-parallel rank whole groups). gate_up: gate above up. vocab: padded
    with zero rows.
    """
    if kind == "qkv":
        grouped = [p.reshape(heads.groups, -1, *p.shape[1:]) for p in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])
    if kind == "gate_up":
        return torch.cat(list(parts))
    (whole,) = parts
    if kind == "vocab" and whole.shape[0] < rows:
        return torch.cat((whole, whole.new_zeros(rows - whole.shape[0], *whole.shape[1:])))
    return whole


def split(kind: Kind, whole: Tensor, heads: Heads, vocab_size: int) -> list[Tensor]:
    """The inverse of `merge`; works on meta tensors too."""
    if kind == "qkv":
        per_group = heads.query // heads.groups
        grouped = whole.reshape(heads.groups, (per_group + 2) * heads.width, *whole.shape[1:])
        widths = [per_group * heads.width, heads.width, heads.width]
        return [p.reshape(-1, *whole.shape[1:]) for p in grouped.split(widths, dim=1)]
    if kind == "gate_up":
        return list(whole.chunk(2))
    return [whole[:vocab_size] if kind == "vocab" else whole]


def shard(kind: Kind, whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Rank's part of a whole Megatron tensor cut along `dim` (0: column parallel and vocabulary, 1: row parallel)."""
    if kind == "gate_up":  # each rank holds its part of the gate above its part of up
        return torch.cat([half.chunk(size, dim)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim)[rank]


def unshard(kind: Kind, parts: Sequence[Tensor], dim: int) -> Tensor:
    """The inverse of `shard`, from the parts of all ranks in order."""
    if kind == "gate_up":
        halves = [p.chunk(2) for p in parts]
        return torch.cat([torch.cat([h[i] for h in halves], dim) for i in (0, 1)])
    return torch.cat(list(parts), dim)
