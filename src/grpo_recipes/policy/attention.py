"""Rotary positions and causal attention over packed or cached sequences. Plain PyTorch, no Megatron.

Shapes: T packed tokens, S sequences, B rows of a decoding batch, K cached tokens, H query heads, G key/value heads,
D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Sequences are padded to the longest of their group. A group holds lengths above 3/4 of its longest, or anything up to
# this many tokens, so that padding stays below a third where it could cost and the number of calls stays logarithmic.
SHORT = 16
FILL = 0.75
HALF = (torch.float16, torch.bfloat16)  # what the variable-length kernel takes


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines by position, as in transformers: computed in float32, used in the dtype of the model."""

    inverse_frequencies: Tensor  # float32 [D / 2]
    attention_factor: float = 1.0  # YaRN's multiplier of cosine and sine

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin of shape [N, 1, D] (to broadcast over heads) for int64 positions [N]."""
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) in the half-split layout of Hugging Face checkpoints; x [N, heads, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True)
class Packing:
    """How T tokens split into sequences, with what attention needs precomputed once per microbatch."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # int32 [S + 1]
    positions: Tensor  # int64 [T], within each sequence
    groups: tuple[tuple[int, int], ...]  # (sequences, padded length) of each group, in the order of the padded buffer
    slots: Tensor  # int64 [T], where each token lies in the padded buffer

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def padded_tokens(self) -> int:
        return sum(count * length for count, length in self.groups)


def pack(lengths: Tensor, device: torch.device | str = "cpu") -> Packing:
    """lengths: int64 [S] on the CPU, each at least 1."""
    sizes = lengths.tolist()
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    positions = torch.arange(sum(sizes)) - starts[:-1].repeat_interleave(lengths)

    order = torch.sort(lengths, descending=True, stable=True).indices
    groups: list[list[int]] = []
    for size in lengths[order].tolist():
        if groups and (size >= FILL * groups[-1][1] or groups[-1][1] <= SHORT):
            groups[-1][0] += 1
        else:
            groups.append([1, size])
    row_lengths = torch.tensor([length for count, length in groups for _ in range(count)])
    row_starts = torch.empty_like(row_lengths)
    row_starts[order] = row_lengths.cumsum(0) - row_lengths
    slots = row_starts.repeat_interleave(lengths) + positions
    return Packing(
        lengths=tuple(sizes),
        cu_seqlens=starts.to(device=device, dtype=torch.int32),
        positions=positions.to(device),
        groups=tuple((count, length) for count, length in groups),
        slots=slots.to(device),
    )


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """Causal attention within each sequence.

    Args:
        query: [T, H, D]; key, value: [T, G, D], G divides H.
        scale: of the scores, 1 / sqrt(D) in most models.

    Returns:
        [T, H, D].
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if query.is_cuda and query.dtype in HALF:
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = packing.cu_seqlens, packing.max_length
        return varlen_attn(query, key, value, cu, cu, longest, longest, scale=scale, window_size=(-1, 0))
    return _padded_attention(query, key, value, packing, scale)


def kernel_name(dtype: torch.dtype) -> str:
    """What `packed_attention` runs for this dtype on this machine, for the manifest."""
    return "varlen" if torch.cuda.is_available() and dtype in HALF else "sdpa"


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """One call per group of similar lengths. Right padding is never seen: causality hides it from real queries."""
    _, heads, width = query.shape
    padded = [
        x.new_zeros(packing.padded_tokens, heads, width).index_copy(0, packing.slots, x) for x in (query, key, value)
    ]
    outputs, start = [], 0
    for count, length in packing.groups:
        stop = start + count * length
        rows = [x[start:stop].view(count, length, heads, width).transpose(1, 2) for x in padded]
        attended = scaled_dot_product_attention(*rows, is_causal=True, scale=scale)
        outputs.append(attended.transpose(1, 2).reshape(stop - start, heads, width))
        start = stop
    return torch.cat(outputs).index_select(0, packing.slots)


@dataclass
class KeyValueCache:
    """Rotated keys and values of B rows, every row ending at the same slot: row b's tokens lie at [pads[b], length).

    Left padding keeps one write position for the whole batch; the mask hides it.
    """

    pads: Tensor  # int64 [B], unused slots at the left of each row
    capacity: int  # slots
    length: int  # slots in use after the forward pass under way
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # [B, G, capacity, D] each, by layer number

    @property
    def visible(self) -> Tensor:
        """bool [B, 1, 1, length]."""
        slots = torch.arange(self.length, device=self.pads.device)
        return (slots >= self.pads[:, None])[:, None, None]

    def fill(self, layer: int, key: Tensor, value: Tensor, packing: Packing) -> None:
        """Store the prompts: key, value [T, G, D], packed, one sequence per row."""
        rows = torch.arange(len(packing.lengths), device=key.device)
        lengths = packing.cu_seqlens.diff()
        row = rows.repeat_interleave(lengths.to(torch.int64), output_size=len(packing.positions))
        shape = (len(rows), key.shape[1], self.capacity, key.shape[2])
        stored = key.new_zeros(shape), value.new_zeros(shape)
        for memory, new in zip(stored, (key, value), strict=True):
            memory[row, :, self.pads[row] + packing.positions] = new
        self.layers[layer] = stored

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one token a row, [B, G, D], in the last slot in use; returns all keys and values, [B, G, length, D]."""
        keys, values = self.layers[layer]
        keys[:, :, self.length - 1], values[:, :, self.length - 1] = key, value
        return keys[:, :, : self.length], values[:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        self.pads = self.pads[rows]
        self.layers = {n: (keys[rows], values[rows]) for n, (keys, values) in self.layers.items()}


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of the newest token of each row.

    Args:
        query: [B, H, D].
        keys, values: [B, G, K, D].
        visible: bool, broadcasts to [B, 1, 1, K].

    Returns:
        [B, H, D].
    """
    rows, heads, width = query.shape
    # The query heads of a group take the place of query positions: no key or value is repeated.
    grouped = query.view(rows, keys.shape[1], heads // keys.shape[1], width)
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scale).reshape(
        rows, heads, width
    )
