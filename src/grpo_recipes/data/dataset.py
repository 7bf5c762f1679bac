"""Datasets: rows in memory, and the pair that a run trains on and is measured by."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from grpo_recipes.data import files, procedural
from grpo_recipes.environments.contract import Example
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import DataConfig, DatasetConfig


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    def __iter__(self) -> Iterator[Example]: ...

    @property
    def excluded(self) -> Mapping[str, int]:
        """Rows left out so far, by reason."""

    def digest(self) -> str:
        """SHA-256 over all rows in order; equal exactly if the rows are."""

    def keep(self, wanted: Callable[[Example], bool], reason: str) -> Dataset:
        """The rows that are wanted, renumbered; the others are counted under `reason`."""


@dataclass(frozen=True)
class Rows:
    """A Dataset held in memory; examples[i].index == i."""

    examples: tuple[Example, ...]
    excluded: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for row in self.examples:
            content = [row.question, row.answer, row.metadata]
            text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()

    def keep(self, wanted: Callable[[Example], bool], reason: str) -> Rows:
        kept = [example for example in self.examples if wanted(example)]
        left_out = len(self) - len(kept)
        excluded = {**self.excluded, reason: left_out} if left_out else self.excluded
        return Rows(_numbered(kept), excluded)


def _numbered(examples: Iterable[Example]) -> tuple[Example, ...]:
    return tuple(replace(example, index=index) for index, example in enumerate(examples))


def load_dataset(config: DatasetConfig, role: str) -> Rows:
    """All rows of one dataset.

    Args:
        role: "train" or "validation", for messages.

    Raises:
        UserError: the source is missing, malformed or empty, or no question matches `question_pattern`.
    """
    where = f"data.{role}"
    examples = (
        procedural.generate(config, where) if config.dataset_name == "reasoning_gym" else files.read(config, where)
    )
    rows = Rows(_numbered(examples))
    if not len(rows):
        raise UserError("the dataset is empty", where=config.path or where, mend="give it at least one row")
    if config.question_pattern is None:
        return rows
    try:
        pattern = re.compile(config.question_pattern)
    except re.error as error:
        raise UserError(f"not a regular expression: {error}", where=f"{where}.question_pattern") from error
    rows = rows.keep(lambda example: pattern.search(example.question) is not None, "off question_pattern")
    if not len(rows):
        raise UserError(
            f"no question matches {config.question_pattern!r}",
            where=f"{where}.question_pattern",
            mend="change the pattern or the dataset",
        )
    return rows


def load_datasets(config: DataConfig) -> tuple[Rows, Rows]:
    """Training rows and validation rows that share no question.

    Validation keeps the first row of each question; training leaves out every question that validation asks. Both
    count what they left out in `excluded`. Two procedural datasets may hold the same problems under different seeds:
    a task can have few problems, and reasoning-gym seeds row i with seed + i, so that neighbouring seeds overlap.
    """
    validation = load_dataset(config.validation, "validation")
    first = {row.question: row.index for row in reversed(validation.examples)}
    validation = validation.keep(lambda row: first[row.question] == row.index, "duplicate")
    train = load_dataset(config.train, "train").keep(lambda row: row.question not in first, "in the validation set")
    if not len(train):
        raise UserError(
            "every training question is also in the validation set",
            where="data.train",
            mend="use another dataset, more rows, or seeds further apart than `size`",
        )
    return train, validation
