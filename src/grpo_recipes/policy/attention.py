"""Rotary positions and causal attention over packed or cached sequences. Plain PyTorch, no Megatron.

Shapes: T packed tokens, S sequences, B rows of a decoding batch, K cached tokens, H query heads, G key/value heads,
D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_recipes.policy.context_parallel import ContextShard, gather_keys

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
class Group:
    """Rows of similar lengths, padded to one rectangle."""

    rows: int
    queries: int  # padded length
    keys: int
    seen: Tensor | None  # int64 [rows, queries], the last key that each query sees; None: the plain causal mask

    def mask(self) -> Tensor | None:
        """bool [rows, 1, queries, keys]"""
        if self.seen is None:
            return None
        return (torch.arange(self.keys, device=self.seen.device) <= self.seen[:, :, None])[:, None]


@dataclass(frozen=True)
class Packing:
    """How packed tokens split into sequences, with what attention needs precomputed once per microbatch.

    T tokens of S sequences in all; N of them are held here (N = T without context parallelism). Attention runs over R
    rows: a row is a run of queries held here and the keys up to the last of them, K keys in all.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # int32 [S + 1], of the whole pack
    positions: Tensor  # int64 [N], within each sequence
    cu_queries: Tensor  # int32 [R + 1]
    cu_keys: Tensor  # int32 [R + 1]
    longest_query: int
    longest_key: int
    groups: tuple[Group, ...]  # for kernels without variable lengths, in the order of the padded buffers
    query_slots: Tensor  # int64 [N], where each query lies in its padded buffer
    key_slots: Tensor  # int64 [K]
    context: ContextShard | None = None
    held: Tensor | None = None  # int64 [N], which of the T tokens are held here
    natural: Tensor | None = None  # int64 [T], where each token lies once all ranks' tokens are gathered
    key_tokens: Tensor | None = None  # int64 [K], where each key lies once gathered

    @property
    def max_length(self) -> int:
        return max(self.lengths)


def pack(lengths: Tensor, device: torch.device | str = "cpu", context: ContextShard | None = None) -> Packing:
    """lengths: int64 [S] on the CPU, each at least 1; under context parallelism multiples of 2 x size."""
    cu_seqlens = _starts(lengths)
    if context is None:
        queries = keys = lengths
        positions = torch.arange(int(lengths.sum())) - cu_seqlens[:-1].repeat_interleave(lengths)
        sharded: dict[str, Tensor] = {}
    else:
        first, queries, offsets = context.token_runs(lengths, context.rank)
        keys = offsets + queries
        positions = _runs(offsets, queries)
        gathered = torch.cat([_runs(*context.token_runs(lengths, rank)[:2]) for rank in range(context.size)])
        natural = torch.empty_like(gathered)
        natural[gathered] = torch.arange(len(gathered))
        key_tokens = natural[_runs(first - offsets, keys)]
        sharded = {"held": _runs(first, queries), "natural": natural, "key_tokens": key_tokens}
    groups, query_slots, key_slots = _group(queries, keys, device)
    return Packing(
        lengths=tuple(lengths.tolist()),
        cu_seqlens=cu_seqlens.to(device=device, dtype=torch.int32),
        positions=positions.to(device),
        cu_queries=_starts(queries).to(device=device, dtype=torch.int32),
        cu_keys=_starts(keys).to(device=device, dtype=torch.int32),
        longest_query=int(queries.max()),
        longest_key=int(keys.max()),
        groups=groups,
        query_slots=query_slots.to(device),
        key_slots=key_slots.to(device),
        context=context,
        **{name: index.to(device) for name, index in sharded.items()},
    )


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _runs(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, … of each run, end to end."""
    return (starts - _starts(lengths)[:-1]).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def _group(queries: Tensor, keys: Tensor, device: torch.device | str) -> tuple[tuple[Group, ...], Tensor, Tensor]:
    """Rows into rectangles, longest first, and where every query and key lies in the padded buffers."""
    order = torch.sort(keys, descending=True, stable=True).indices
    members: list[list[int]] = []
    longest = 0
    for row, size in zip(order.tolist(), keys[order].tolist(), strict=True):
        if not members or (size < FILL * longest and longest > SHORT):
            members.append([])
            longest = size
        members[-1].append(row)
    plain = torch.equal(queries, keys)
    groups, query_starts, key_starts, query_end, key_end = [], torch.empty_like(keys), torch.empty_like(keys), 0, 0
    for rows in members:
        width, height, count = int(queries[rows].max()), int(keys[rows].max()), torch.arange(len(rows))
        query_starts[rows], key_starts[rows] = query_end + count * width, key_end + count * height
        query_end, key_end = query_end + len(rows) * width, key_end + len(rows) * height
        # The last query of a row sees its last key.
        seen = None if plain else ((keys[rows] - queries[rows])[:, None] + torch.arange(width)).to(device)
        groups.append(Group(len(rows), width, height, seen))
    return tuple(groups), _runs(query_starts, queries), _runs(key_starts, keys)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """Causal attention within each sequence.

    Under context parallelism keys and values of the whole pack are gathered from all ranks: memory for them grows with
    T, not T / size.

    Args:
        query: [N, H, D]; key, value: [N, G, D], G divides H.
        scale: of the scores, 1 / sqrt(D) in most models.

    Returns:
        [N, H, D].
    """
    if packing.context is not None:
        both = gather_keys(torch.stack((key, value), dim=1), packing.context.group)
        key, value = both.index_select(0, packing.key_tokens).unbind(1)
    if query.is_cuda and query.dtype in HALF:
        from torch.nn.attention.varlen import varlen_attn

        # FlashAttention, which this calls, reads each key/value head for all query heads of its group.
        rows = packing.cu_queries, packing.cu_keys, packing.longest_query, packing.longest_key
        return varlen_attn(query, key, value, *rows, scale=scale, window_size=(-1, 0))
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return _padded_attention(query, key, value, packing, scale)


def kernel_name(dtype: torch.dtype) -> str:
    """What `packed_attention` runs for this dtype on this machine, for the manifest."""
    return "varlen" if torch.cuda.is_available() and dtype in HALF else "sdpa"


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """One call per group of similar lengths. Right padding is never seen: causality hides it from real queries."""
    _, heads, width = query.shape
    query_slots = sum(group.rows * group.queries for group in packing.groups)
    key_slots = sum(group.rows * group.keys for group in packing.groups)
    queries = query.new_zeros(query_slots, heads, width).index_copy(0, packing.query_slots, query)
    keys, values = (x.new_zeros(key_slots, heads, width).index_copy(0, packing.key_slots, x) for x in (key, value))
    outputs, query_start, key_start = [], 0, 0
    for group in packing.groups:
        query_stop, key_stop = query_start + group.rows * group.queries, key_start + group.rows * group.keys
        attended = scaled_dot_product_attention(
            queries[query_start:query_stop].view(group.rows, group.queries, heads, width).transpose(1, 2),
            *(x[key_start:key_stop].view(group.rows, group.keys, heads, width).transpose(1, 2) for x in (keys, values)),
            attn_mask=group.mask(),
            is_causal=group.seen is None,
            scale=scale,
        )
        outputs.append(attended.transpose(1, 2).reshape(query_stop - query_start, heads, width))
        query_start, key_start = query_stop, key_stop
    return torch.cat(outputs).index_select(0, packing.query_slots)


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
