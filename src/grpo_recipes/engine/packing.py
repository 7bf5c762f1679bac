"""Which sequences run together: over data-parallel ranks, then into microbatches of at most so many tokens."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: bins of sequence indices, each bin at most `capacity` tokens.

    Johnson et al. (1974): at most 11/9 of the optimal number of bins plus 6/9.

    Raises:
        ValueError: a sequence is longer than the capacity.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > capacity:
            raise ValueError(f"sequence {index} has {lengths[index]} tokens, more than the capacity {capacity}")
        slot = next((b for b, free in enumerate(room) if free >= lengths[index]), len(bins))
        if slot == len(bins):
            bins.append([])
            room.append(capacity)
        bins[slot].append(index)
        room[slot] -= lengths[index]
    return [sorted(members) for members in bins]


def chunk(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive sequences, `size` to a microbatch whatever their lengths: what runs with packing switched off."""
    return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]


def assign_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sequence indices of each data-parallel rank: longest first, each to the rank with the least work so far.

    Work of a sequence of n tokens counts n + n^2 / 8192: linear layers and causal attention of a model whose
    attention costs as much as the rest at some 8K tokens.
    """
    share: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], len(share[r]), r))
        share[rank].append(index)
        load[rank] += lengths[index] + lengths[index] ** 2 / 8192
    return [sorted(members) for members in share]
