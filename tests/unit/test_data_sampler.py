"""Covers: data order shifts on the second resume."""

import random
from collections import Counter

import pytest

from grpo_recipes.data.sampler import SamplerState, next_indices
from grpo_recipes.errors import UserError


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("chunks", [[1], [7], [50], [3, 1, 20], [120]])
def test_every_epoch_visits_every_row_once_whatever_the_chunks(chunks: list[int], shuffle: bool) -> None:
    size, epochs, drawn, state, turn = 50, 4, [], SamplerState(seed=5), 0
    while len(drawn) < size * epochs:
        rows, state = next_indices(state, size, chunks[turn % len(chunks)], shuffle)
        drawn, turn = drawn + rows, turn + 1
    for epoch in range(epochs):
        assert Counter(drawn[epoch * size : (epoch + 1) * size]) == Counter(range(size))


def test_resuming_anywhere_twice_gives_the_uninterrupted_order() -> None:
    whole, _ = next_indices(SamplerState(seed=9), 13, 60, True)
    points = random.Random(0)
    for _ in range(50):
        first, second = sorted(points.sample(range(61), 2))
        rows_a, state = next_indices(SamplerState(seed=9), 13, first, True)
        state = SamplerState(state.seed, state.epoch, state.cursor)  # all that a checkpoint holds
        rows_b, state = next_indices(state, 13, second - first, True)
        rows_c, _ = next_indices(SamplerState(state.seed, state.epoch, state.cursor), 13, 60 - second, True)
        assert rows_a + rows_b + rows_c == whole


def test_order_is_fixed_for_ever_by_seed_and_epoch() -> None:
    rows, state = next_indices(SamplerState(seed=42), 8, 16, True)
    assert rows == [0, 6, 1, 5, 3, 7, 2, 4, 6, 7, 1, 5, 3, 2, 4, 0]
    assert state == SamplerState(seed=42, epoch=2, cursor=0)


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(next_indices(SamplerState(s, e), 30, 30, True)[0]) for s in range(3) for e in range(3)]
    assert len(set(orders)) == 9


def test_permutations_are_uniform() -> None:
    counts = Counter(tuple(next_indices(SamplerState(s), 3, 3, True)[0]) for s in range(6000))
    assert len(counts) == 6
    assert all(880 < count < 1120 for count in counts.values())  # 1000 expected, standard deviation 29


def test_no_rows_drawn_leaves_the_state() -> None:
    assert next_indices(SamplerState(1, 2, 3), 10, 0, True) == ([], SamplerState(1, 2, 3))


def test_a_finished_epoch_is_the_start_of_the_next() -> None:
    assert next_indices(SamplerState(0), 4, 4, False) == ([0, 1, 2, 3], SamplerState(0, 1, 0))


def test_dataset_that_shrank_is_refused() -> None:
    with pytest.raises(UserError, match="row 9 of its epoch, but the dataset has 5 rows"):
        next_indices(SamplerState(0, 0, 9), 5, 1, True)


def test_empty_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="dataset is empty"):
        next_indices(SamplerState(0), 0, 1, True)
