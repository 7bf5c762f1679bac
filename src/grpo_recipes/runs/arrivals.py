"""arrivals.jsonl: which groups each step of an asynchronous run trained on. One JSON object a line:

{"attempt": 1, "step": 3, "groups": [5, 4], "pending": [6, 7]}

step: counted from 1. groups: numbers, in the order in which they were complete. pending: asked for and left for later
steps. Of a step the last line counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from grpo_recipes.errors import UserError
from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.metrics import mend_torn_tail


def add_arrival(folder: RunFolder, attempt: int, step: int, groups: Sequence[int], pending: Sequence[int]) -> None:
    mend_torn_tail(folder.arrivals_path)
    line = {"attempt": attempt, "step": step, "groups": list(groups), "pending": list(pending)}
    with folder.arrivals_path.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def read_arrivals(folder: RunFolder) -> dict[int, tuple[int, ...]]:
    """{step, counted from 1: numbers of its groups}. Raises UserError if there is no such file, or it is damaged."""
    path = folder.arrivals_path
    if not path.is_file():
        raise UserError("no such file", where=str(path), mend="name an asynchronous run (grpo.async_grpo.enabled)")
    try:
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        return {int(line["step"]): tuple(map(int, line["groups"])) for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"is damaged: {error}", where=str(path), mend="restore the file") from error
