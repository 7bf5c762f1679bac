import random

import pytest

from grpo_recipes.engine.packing import Counted, Packed, Similar, cut_evenly, packing_stats, same_number, share
from grpo_recipes.policy.alignment import Alignment, alignment

PLAIN = Alignment(1, 1)


def quadratic(n: int) -> int:
    return n * (8192 + n)


def packed(tokens: int, align: Alignment = PLAIN, pipeline: bool = False) -> Packed:
    return Packed(tokens, align, quadratic, pipeline)


def draw(count: int, longest: int, seed: int) -> list[int]:
    return [min(longest, 1 + int(random.Random(f"{seed} {i}").lognormvariate(6, 0.8))) for i in range(count)]


def first_fit_decreasing(lengths, capacity):
    """What one process has always run; recorded results depend on its order."""
    bins, room = [], []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = next((b for b, free in enumerate(room) if free >= lengths[index]), len(bins))
        if slot == len(bins):
            bins.append([])
            room.append(capacity)
        bins[slot].append(index)
        room[slot] -= lengths[index]
    return [sorted(members) for members in bins]


def test_one_rank_runs_first_fit_decreasing_in_its_order():
    strategy = packed(10)
    assert share([7, 3, 5, 5, 8, 2, 1, 9], 1, strategy) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert cut_evenly([[7, 3, 5, 5, 8, 2, 1, 9]], strategy) == [[[6, 7], [4, 5], [0, 1], [2, 3]]]
    assert cut_evenly([[2, 9, 4, 4, 3, 6, 1, 1, 5]], strategy) == [[[1, 6], [2, 5], [3, 7, 8], [0, 4]]]
    assert cut_evenly([[8, 9, 10, 8, 9]], packed(8192)) == [[[0, 1, 2, 3, 4]]]
    tiny = [8 + i % 3 for i in range(512)]  # a step of the smallest recipe is one microbatch, in order
    assert cut_evenly([tiny], packed(8192)) == [[list(range(512))]] == [first_fit_decreasing(tiny, 8192)]
    same = []
    for seed in range(40):
        lengths = draw(60, 2048, seed)
        [found], before = cut_evenly([lengths], packed(2048)), first_fit_decreasing(lengths, 2048)
        assert found == before or len(found) < len(before)
        same.append(found == before)
    assert sum(same) > 20


def test_one_rank_leaves_first_fit_only_to_save_a_microbatch():
    lengths = [5, 4, 4, 3, 2, 2]  # first fit decreasing: 5 4, 4 3 2, 2
    assert len(first_fit_decreasing(lengths, 10)) == 3
    [bins] = cut_evenly([lengths], packed(10))
    assert sorted(sum(lengths[i] for i in b) for b in bins) == [10, 10]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize(
    "strategy",
    [packed(2048), packed(2048, Alignment(8, 32)), Similar(4096, 64, PLAIN, quadratic), Counted(3, PLAIN, quadratic)],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.parametrize("count", [0, 1, 5, 97])
def test_nothing_is_lost_and_every_rank_runs_as_many_passes(ranks, multiple, strategy, count):
    """Covers: a batch that does not divide is cut; uneven microbatch counts hang a rank."""
    lengths = draw(count, 2048, 1)
    shares = share(lengths, ranks, strategy, multiple)
    assert sorted(i for members in shares for i in members) == list(range(count))
    cuts = cut_evenly([[lengths[i] for i in members] for members in shares], strategy, multiple)
    assert len({len(bins) for bins in cuts}) == 1
    assert len(cuts[0]) % multiple == 0 and len(cuts[0]) >= 1
    for members, bins in zip(shares, cuts, strict=True):
        assert sorted(i for b in bins for i in b) == list(range(len(members)))
        assert share(lengths, ranks, strategy, multiple) == shares  # the same again


@pytest.mark.parametrize("align", [PLAIN, Alignment(8, 8), Alignment(16, 64)])
def test_a_microbatch_holds_its_tokens_after_padding(align):
    """Covers: alignment to 2 x CP x TP forgotten."""
    lengths = draw(200, 1000, 2)
    strategy = packed(1000, align)
    assert strategy.capacity == {1: 1000, 8: 1000, 64: 1024}[align.pack]
    shares = share(lengths, 4, strategy)
    cuts = cut_evenly([[lengths[i] for i in members] for members in shares], strategy)
    for members, bins in zip(shares, cuts, strict=True):
        for bin_ in bins:
            assert align.computed([lengths[members[i]] for i in bin_]) <= strategy.capacity


def test_the_longest_sequence_fits_whatever_the_alignment():
    strategy = packed(10, alignment(2, 2, True))
    assert cut_evenly([[10], [3]], strategy) == [[[0]], [[0]]]


def test_a_sequence_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, more than the capacity 10"):
        share([3, 11], 2, packed(10))
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, more than the capacity 10"):
        cut_evenly([[3, 11]], packed(10))


def test_equal_tokens_are_not_equal_work():
    """One sequence of 8,192 tokens costs as much as 14 of 1,024, not as 8."""
    lengths = [8192] + [1024] * 16
    shares = share(lengths, 2, packed(16384))
    work = [sum(quadratic(lengths[i]) for i in members) for members in shares]
    assert sorted(len(members) for members in shares) == [2, 15]
    assert max(work) / (sum(work) / 2) < 1.01


def test_pipelines_get_equal_microbatches_even_on_one_rank():
    lengths = [60, 50, 40, 30, 30, 20, 20, 10, 10, 10]  # 280 tokens, first fit decreasing: 100, 100, 80
    [first_fit], [even] = (cut_evenly([lengths], packed(100, pipeline=pipeline)) for pipeline in (False, True))
    assert sorted(sum(lengths[i] for i in b) for b in first_fit) == [80, 100, 100]
    assert sorted(sum(lengths[i] for i in b) for b in even) == [90, 90, 100]


def test_the_nth_microbatches_of_ranks_are_alike():
    lengths = draw(128, 2048, 3)
    shares = share(lengths, 4, packed(4096))
    for members, bins in zip(shares, cut_evenly([[lengths[i] for i in m] for m in shares], packed(4096)), strict=True):
        work = [sum(quadratic(lengths[members[i]]) for i in b) for b in bins]
        assert work == sorted(work, reverse=True)


def test_dynamic_batching_counts_the_longest():
    strategy = Similar(256, 64, PLAIN, quadratic)
    lengths = [100, 60, 250, 64, 65, 10, 128]
    #    250 -> 256: alone; 128 -> 128: two; 65 -> 128: two; 60 -> 64 and 10: up to four
    assert cut_evenly([lengths], strategy) == [[[2], [0, 6], [3, 4], [1, 5]]]
    assert cut_evenly([[300]], strategy) == [[[0]]]


def test_counting_sequences_keeps_their_order():
    assert cut_evenly([[9, 1, 9, 1, 9]], Counted(2, PLAIN, quadratic)) == [[[0, 1], [2, 3], [4]]]


def test_same_number():
    """Covers: uneven microbatch counts hang a rank."""
    assert same_number([[[0], [1]], [[0]], []]) == [[[0], [1]], [[0], []], [[], []]]
    assert same_number([[], []]) == [[[]], [[]]]
    assert same_number([[[0]], [[0], [1], [2]]], multiple=2) == [[[0], [], [], []], [[0], [1], [2], []]]


def test_packing_stats_literal():
    strategy = packed(16, Alignment(4, 8))
    steps = [[[[5, 3], [4]], [[8], []]], [[[4]], [[4]]]]  # computed: 16, 8; 8, 8 (an empty one of 2 tokens); 8; 8
    found = packing_stats(steps, strategy, empty=2)
    assert found.padding_fraction == 1 - 28 / 56
    first = [quadratic(5) + quadratic(3) + quadratic(4), quadratic(8)]
    assert found.rank_imbalance == pytest.approx((first[0] + quadratic(4)) * 2 / (sum(first) + 2 * quadratic(4)) - 1)
    assert found.microbatches == 1.5
