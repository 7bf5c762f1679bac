"""Which rows come next: the whole state is three integers, so a resumed run cannot see other data."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from grpo_recipes.errors import UserError


@dataclass(frozen=True)
class SamplerState:
    """`cursor` rows of epoch `epoch` have been handed out; a finished epoch is stated as the start of the next one."""

    seed: int
    epoch: int = 0
    cursor: int = 0


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """A permutation of range(size), uniform and a function of its arguments only.

    Rows are sorted by random keys: Random.random() repeats across Python versions, shuffle() does not promise to.
    """
    draw = random.Random(f"{seed}:{epoch}")
    keys = [draw.random() for _ in range(size)]
    return tuple(sorted(range(size), key=keys.__getitem__))


def number_of(state: SamplerState, size: int) -> int:
    """Rows that have been handed out since the run began: the number of the next one."""
    return state.epoch * size + state.cursor


def row_of(number: int, seed: int, size: int, shuffle: bool) -> int:
    """The row that was, or will be, handed out as that number, from 0."""
    epoch, cursor = divmod(number, size)
    return epoch_order(seed, epoch, size)[cursor] if shuffle else cursor


def next_indices(state: SamplerState, size: int, n: int, shuffle: bool) -> tuple[list[int], SamplerState]:
    """The next `n` rows of a dataset of `size` rows, and the state after them.

    Each epoch visits every row exactly once, whatever the values of `n`; a draw may run over into later epochs.

    Raises:
        UserError: the dataset is empty, or the state belongs to a larger one.
    """
    if size <= 0:
        raise UserError("the dataset is empty", where="data.train")
    if state.cursor >= size:
        raise UserError(
            f"the saved position is row {state.cursor} of its epoch, but the dataset has {size} rows",
            where="data.train",
            mend="resume with the dataset the run started with",
        )
    indices: list[int] = []
    epoch, cursor = state.epoch, state.cursor
    while len(indices) < n:
        take = min(n - len(indices), size - cursor)
        rows = epoch_order(state.seed, epoch, size) if shuffle else range(size)
        indices.extend(rows[cursor : cursor + take])
        cursor += take
        if cursor == size:
            epoch, cursor = epoch + 1, 0
    return indices, SamplerState(state.seed, epoch, cursor)
