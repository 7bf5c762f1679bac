"""Which sequences run together: over data-parallel ranks, then in microbatches. The same input, the same output.

Two decisions. `share` gives each rank its sequences so that no rank computes much more than another; `cut_evenly` makes
them into microbatches, as many on every rank. A strategy says what a microbatch may hold. The cost of a sequence is
that of recipe.model_flops, linear and quadratic in its length: equal tokens are not equal work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_recipes.engine.binning import balance, deal, first_fit, longest_first, place, tightest
from grpo_recipes.policy.alignment import Alignment, round_up

Cost = Callable[[int], int]  # FLOPs of a sequence of so many tokens
Microbatches = list[list[int]]  # of one rank and pass: the sequences of each, by index; empty ones fill up

WORTH_A_MICROBATCH = 0.01  # excess of the costliest rank over the mean above which one more microbatch is tried


class Strategy(Protocol):
    """What a microbatch may hold."""

    @property
    def cost(self) -> Cost: ...

    @property
    def alignment(self) -> Alignment: ...

    def groups(self, lengths: Sequence[int], enough: int) -> Microbatches:
        """As few microbatches as can be found; no search for fewer than `enough`."""

    def fits(self, lengths: Sequence[int], passes: int) -> bool:
        """So many microbatches are found to be enough."""

    def bound(self, lengths: Sequence[int], ranks: int) -> int:
        """However they are shared out, a rank needs as many microbatches."""

    def cut(self, lengths: Sequence[int], passes: int) -> Microbatches:
        """For one of several ranks: microbatches of these sequences, at most `passes` if they fit in as many."""

    def alone(self, lengths: Sequence[int]) -> Microbatches:
        """For an only rank."""


@dataclass(frozen=True)
class Packed:
    """Up to so many tokens a microbatch, padding included; equal in cost as far as that allows.

    Args:
        tokens: rounded up to what parallelism asks for, so that the longest sequence always fits.
        pipeline: there are several pipeline stages. Then the microbatches of an only rank are made equal, too; without
            them first-fit decreasing is as good, and recorded runs of one rank rest on its order.
    """

    tokens: int
    alignment: Alignment
    cost: Cost
    pipeline: bool = False

    @property
    def capacity(self) -> int:
        return round_up(self.tokens, self.alignment.pack)

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        return [self.alignment.padded(n) for n in lengths]

    def groups(self, lengths: Sequence[int], enough: int = 0) -> Microbatches:
        return tightest(self.sizes(lengths), self.capacity, enough)

    def fits(self, lengths: Sequence[int], passes: int) -> bool:
        sizes = self.sizes(lengths)
        return sum(sizes) <= passes * self.capacity and len(tightest(sizes, self.capacity, passes)) <= passes

    def bound(self, lengths: Sequence[int], ranks: int) -> int:
        return max(1, -(-sum(self.sizes(lengths)) // (self.capacity * ranks)))

    def cut(self, lengths: Sequence[int], passes: int) -> Microbatches:
        sizes, costs = self.sizes(lengths), [self.cost(n) for n in lengths]
        bins = place(sizes, costs, passes, self.capacity) or tightest(sizes, self.capacity, passes)
        bins += [[] for _ in range(passes - len(bins))]
        balance(bins, costs, lambda members: sum(sizes[i] for i in members) <= self.capacity)
        # The n-th microbatches of all ranks run at the same time, and experts exchange tokens in each.
        bins.sort(key=lambda members: (-sum(costs[i] for i in members), members))
        return [sorted(members) for members in bins if members]

    def alone(self, lengths: Sequence[int]) -> Microbatches:
        bins = first_fit(self.sizes(lengths), self.capacity)
        fewest = len(self.groups(lengths))
        return self.cut(lengths, fewest) if self.pipeline or fewest < len(bins) else bins


@dataclass(frozen=True)
class Similar:
    """Dynamic batching: sequences of similar length, whose number x the longest, rounded up, is at most so many tokens.

    Nothing is padded to the longest, since sequences lie end to end: the rule only says which run together.
    """

    tokens: int
    round_to: int
    alignment: Alignment
    cost: Cost

    def groups(self, lengths: Sequence[int], enough: int = 0) -> Microbatches:
        groups: Microbatches = []
        most = 0
        for index in longest_first(lengths):
            if not groups or len(groups[-1]) == most:
                groups.append([])
                most = max(1, self.tokens // round_up(self.alignment.padded(lengths[index]), self.round_to))
            groups[-1].append(index)
        return [sorted(members) for members in groups]

    def fits(self, lengths: Sequence[int], passes: int) -> bool:
        return len(self.groups(lengths)) <= passes

    def bound(self, lengths: Sequence[int], ranks: int) -> int:
        return max(1, -(-len(self.groups(lengths)) // ranks))

    def cut(self, lengths: Sequence[int], passes: int) -> Microbatches:
        return self.groups(lengths)

    def alone(self, lengths: Sequence[int]) -> Microbatches:
        return self.groups(lengths)


@dataclass(frozen=True)
class Counted:
    """So many consecutive sequences a microbatch, whatever their lengths."""

    size: int
    alignment: Alignment
    cost: Cost

    def groups(self, lengths: Sequence[int], enough: int = 0) -> Microbatches:
        starts = range(0, len(lengths), self.size)
        return [list(range(start, min(start + self.size, len(lengths)))) for start in starts]

    def fits(self, lengths: Sequence[int], passes: int) -> bool:
        return len(lengths) <= passes * self.size

    def bound(self, lengths: Sequence[int], ranks: int) -> int:
        return max(1, -(-len(lengths) // (self.size * ranks)))

    def cut(self, lengths: Sequence[int], passes: int) -> Microbatches:
        return self.groups(lengths)

    def alone(self, lengths: Sequence[int]) -> Microbatches:
        return self.groups(lengths)


def share(lengths: Sequence[int], ranks: int, strategy: Strategy, multiple: int = 1) -> list[list[int]]:
    """The sequences of each data-parallel rank, by index, ascending.

    The number of microbatches per rank is as small as can be found, and one (or `multiple`) more only where that makes
    the ranks more equal in cost by a hundredth.

    Raises:
        ValueError: a sequence is longer than a microbatch.
    """
    if ranks == 1 or not lengths:
        return [list(range(len(lengths)))] + [[] for _ in range(ranks - 1)]
    costs = [strategy.cost(n) for n in lengths]
    bound = round_up(strategy.bound(lengths, ranks), multiple)
    groups = strategy.groups(lengths, enough=ranks * bound)
    found: list[list[list[int]]] = []
    for passes in range(bound, len(groups) + 2 * multiple, multiple):
        shares = _share(lengths, costs, groups, ranks, strategy, passes)
        found += [shares] if shares else []
        if found and (passes > bound or _excess(found[0], costs) <= WORTH_A_MICROBATCH):
            break
    best = min(found, key=lambda shares: _excess(shares, costs), default=deal(costs, ranks))
    if found and _excess(found[0], costs) <= _excess(best, costs) + WORTH_A_MICROBATCH:
        best = found[0]
    return [sorted(members) for members in best]


def _excess(shares: Sequence[Sequence[int]], costs: Sequence[int]) -> float:
    """The costliest rank over the mean - 1."""
    return max(sum(costs[i] for i in members) for members in shares) * len(shares) / sum(costs) - 1


def _share(
    lengths: Sequence[int], costs: Sequence[int], groups: Microbatches, ranks: int, strategy: Strategy, passes: int
) -> list[list[int]] | None:
    """Shares that fit in so many microbatches on every rank, equal in cost as far as that allows."""

    def fits(members: Sequence[int]) -> bool:
        return strategy.fits([lengths[i] for i in members], passes)

    for start in _starts(costs, groups, ranks, passes):
        if all(map(fits, start)):
            balance(start, costs, fits)
            return start
    return None


def _starts(costs: Sequence[int], groups: Microbatches, ranks: int, passes: int) -> Iterator[list[list[int]]]:
    yield deal(costs, ranks)
    if len(groups) <= ranks * passes:
        dealt = deal([sum(costs[i] for i in members) for members in groups], ranks, at_most=passes)
        yield [[i for group in share for i in groups[group]] for share in dealt]


def cut_evenly(per_rank: Sequence[Sequence[int]], strategy: Strategy, multiple: int = 1) -> list[Microbatches]:
    """Microbatches of every rank from the lengths of its sequences, as many on each rank."""
    if len(per_rank) == 1:
        return same_number([strategy.alone(per_rank[0])], multiple)
    bound = round_up(max(strategy.bound(lengths, 1) for lengths in per_rank), multiple)
    passes = round_up(max(1, *(len(strategy.groups(lengths, enough=bound)) for lengths in per_rank)), multiple)
    return same_number([strategy.cut(lengths, passes) for lengths in per_rank], multiple)


@dataclass(frozen=True)
class PackingStats:
    """Of the training passes of a rollout batch."""

    padding_fraction: float  # padded, filling and empty tokens / computed tokens
    rank_imbalance: float  # cost of each optimizer step's costliest rank, summed / means over ranks, summed - 1
    microbatches: float  # per rank and optimizer step, mean


def packing_stats(steps: Sequence[Sequence[Sequence[Sequence[int]]]], strategy: Strategy, empty: int) -> PackingStats:
    """Args: steps: lengths of the sequences, [optimizer step][rank][microbatch]; empty: tokens of an empty one."""
    bins = [lengths for ranks in steps for passes in ranks for lengths in passes]
    computed = sum(strategy.alignment.computed(lengths or [empty]) for lengths in bins)
    costs = [[sum(strategy.cost(n) for lengths in passes for n in lengths) for passes in ranks] for ranks in steps]
    return PackingStats(
        padding_fraction=1 - sum(sum(lengths) for lengths in bins) / computed,
        rank_imbalance=sum(map(max, costs)) * len(costs[0]) / sum(map(sum, costs)) - 1,
        microbatches=sum(len(ranks[0]) for ranks in steps) / len(steps),
    )


def same_number(per_rank: Sequence[Microbatches], multiple: int = 1) -> list[Microbatches]:
    """Append empty microbatches until every rank has as many as the longest, at least one and a multiple."""
    most = round_up(max(1, *(len(bins) for bins in per_rank)), multiple)
    return [[*bins, *([] for _ in range(most - len(bins)))] for bins in per_rank]
