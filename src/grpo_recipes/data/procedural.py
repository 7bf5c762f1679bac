"""Problems that reasoning-gym makes from a seed."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

from grpo_recipes.environments.contract import Example
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import DatasetConfig


def generate(config: DatasetConfig, where: str) -> Iterator[Example]:
    """`size` problems of `task`, a function of task, task_args and seed.

    The metadata holds what the task's verifier needs: its name, its arguments and the whole entry. Tasks that judge
    by rule and have no reference answer give an empty one.

    Raises:
        UserError: task or arguments unknown to reasoning-gym, or refused by the task.
    """
    if config.task is None or config.size is None:
        missing = "task" if config.task is None else "size"
        raise UserError("a reasoning_gym dataset needs it", where=f"{where}.{missing}", mend="set it")
    dataset = _create(config.task, dict(config.task_args), config.size, config.seed, where)
    for index in range(config.size):
        entry = dataset[index]
        metadata = {"task": config.task, "task_args": dict(config.task_args), "entry": entry}
        yield Example(index, entry["question"], entry["answer"] or "", metadata)


def _create(task: str, task_args: dict[str, Any], size: int, seed: int, where: str) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)
        raise UserError(f"reasoning-gym has no task {task!r}", where=f"{where}.task", mend=f"use {', '.join(close)}")
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"size", "seed"}
    for name in task_args:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3) or sorted(known)
            mend = f"use {where}.{name}" if name in ("size", "seed") else f"use {', '.join(close)}"
            raise UserError(f"{task} has no argument {name!r}", where=f"{where}.task_args.{name}", mend=mend)
    try:
        return reasoning_gym.create_dataset(task, **task_args, size=size, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:  # the tasks validate with assert
        raise UserError(f"{task} refuses its arguments: {error}", where=f"{where}.task_args") from error
