"""Bins of items with a size and a cost: fitting, dealing out, evening out. Items are named by index. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

Bins = list[list[int]]

EVEN = 0.002  # excess of the costliest group over the mean at which evening out ends
TRIES = 12  # exchanges between two groups that are tried for a fit
MOST_LOOKED_AT = 128  # items that a bin's best subset is sought among


def longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


def first_fit(sizes: Sequence[int], capacity: int) -> Bins:
    """First-fit decreasing. Johnson et al. (1974): at most 11/9 of the optimal number of bins plus 6/9.

    Raises:
        ValueError: an item is larger than the capacity.
    """
    _check(sizes, capacity)
    bins: Bins = []
    room: list[int] = []
    for index in longest_first(sizes):
        slot = next((b for b, free in enumerate(room) if free >= sizes[index]), len(bins))
        if slot == len(bins):
            bins.append([])
            room.append(capacity)
        bins[slot].append(index)
        room[slot] -= sizes[index]
    return [sorted(members) for members in bins]


def best_fit(sizes: Sequence[int], capacity: int) -> Bins:
    """Best-fit decreasing: each item into the fullest bin that has room. n log n."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    for index in longest_first(sizes):
        slot = bisect_left(rooms, (sizes[index], -1))
        if slot == len(rooms):
            room, bin_ = capacity, len(bins)
            bins.append([])
        else:
            room, bin_ = rooms.pop(slot)
        bins[bin_].append(index)
        insort(rooms, (room - sizes[index], bin_))
    return bins


def fullest(sizes: Sequence[int], capacity: int) -> Bins:
    """Fill one bin after the other as full as can be: the largest item left and the best subset of the others.

    The subset is exact: bit s of an integer says that some items sum to s. Caprara and Pferschy (2004) bound this
    heuristic's bins. Of very many others, some of every size are looked at: they fill a bin as well.
    """
    left, bins = longest_first(sizes), []
    within = (1 << (capacity + 1)) - 1
    while left:
        some = left[:: -(-len(left) // MOST_LOOKED_AT)]
        reach = [1 << sizes[some[0]]]
        for index in some[1:]:
            reach.append((reach[-1] | reach[-1] << sizes[index]) & within)
            if reach[-1] >> capacity:
                break  # nothing is fuller than full
        total, members = reach[-1].bit_length() - 1, [some[0]]
        for n in range(len(reach) - 1, 0, -1):
            if not reach[n - 1] >> total & 1:
                members.append(some[n])
                total -= sizes[some[n]]
        bins.append(members)
        taken = set(members)
        left = [i for i in left if i not in taken]
    return bins


def tightest(sizes: Sequence[int], capacity: int, enough: int = 0) -> Bins:
    """As few bins as `best_fit` or `fullest` find; the second is asked only if the first exceeds `enough` and the sum.

    Raises:
        ValueError: an item is larger than the capacity.
    """
    _check(sizes, capacity)
    bins = best_fit(sizes, capacity)
    if len(bins) <= max(enough, -(-sum(sizes) // capacity)):
        return bins
    return min(bins, fullest(sizes, capacity), key=len)


def place(sizes: Sequence[int], costs: Sequence[int], count: int, capacity: int) -> Bins | None:
    """So many bins, the costliest items first, each into the cheapest bin with room; none if one finds no room."""
    bins: Bins = [[] for _ in range(count)]
    room, load = [capacity] * count, [0] * count
    for index in longest_first(costs):
        slots = [b for b in range(count) if room[b] >= sizes[index]]
        if not slots:
            return None
        slot = min(slots, key=load.__getitem__)
        bins[slot].append(index)
        room[slot] -= sizes[index]
        load[slot] += costs[index]
    return bins


def deal(costs: Sequence[int], hands: int, at_most: int | None = None) -> Bins:
    """The costliest first, each to the hand with the least so far; `at_most` items a hand (then all must find one).

    Graham (1969): the costliest hand is at most 4/3 of the best possible.
    """
    dealt: Bins = [[] for _ in range(hands)]
    heap = [(0, hand) for hand in range(hands)]
    for index in longest_first(costs):
        load, hand = heappop(heap)
        dealt[hand].append(index)
        if at_most is None or len(dealt[hand]) < at_most:
            heappush(heap, (load + costs[index], hand))
    return dealt


def balance(groups: Bins, costs: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> None:
    """Move and exchange items until the costliest group is hardly above the mean or nothing helps it. In place.

    An exchange is taken if both groups fit afterwards; of those between two groups, the ones are tried first that
    leave them nearest to equal. Each lowers the sum of squared loads, and their number is bounded.
    """
    loads = [sum(costs[i] for i in members) for members in groups]
    aim = sum(loads) / len(loads) * (1 + EVEN)
    for _ in range(16 * len(groups)):
        high = max(range(len(groups)), key=loads.__getitem__)
        if loads[high] <= aim:
            return
        for low in sorted(range(len(groups)), key=loads.__getitem__):
            if low == high or loads[low] >= loads[high]:
                continue
            exchange = _exchange(groups[high], groups[low], costs, loads[high] - loads[low], fits)
            if exchange:
                groups[high], groups[low] = exchange
                loads[high], loads[low] = (sum(costs[i] for i in members) for members in exchange)
                break
        else:
            return


def _exchange(
    high: list[int], low: list[int], costs: Sequence[int], gap: int, fits: Callable[[Sequence[int]], bool]
) -> tuple[list[int], list[int]] | None:
    """Two groups after the fitting exchange of one item for one or none that closes most of the gap."""
    back = sorted((costs[j], j) for j in low)
    options: list[tuple[int, int, int]] = []  # (distance from half the gap, item, item in return or -1)
    for i in high:
        at = bisect_left(back, (costs[i] - gap // 2, -1))
        for cost, j in [(0, -1), *back[max(0, at - 2) : at + 2]]:
            if 0 < costs[i] - cost < gap:
                options.append((abs(2 * (costs[i] - cost) - gap), i, j))
    for _, i, j in sorted(options)[:TRIES]:
        less = [m for m in high if m != i] + ([j] if j >= 0 else [])
        more = [m for m in low if m != j] + [i]
        if fits(more) and fits(less):
            return less, more
    return None


def _check(sizes: Sequence[int], capacity: int) -> None:
    for index, size in enumerate(sizes):
        if size > capacity:
            raise ValueError(f"sequence {index} has {size} tokens, more than the capacity {capacity}")
