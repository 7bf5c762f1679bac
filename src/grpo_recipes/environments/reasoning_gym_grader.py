"""Judges one response with a reasoning-gym task's verifier. Runs in a GraderPool."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import reasoning_gym


def grade(task: str, task_args: dict[str, Any], entry: dict[str, Any], pattern: str | None, response: str) -> float:
    """The verifier's score of the answer in the response.

    Args:
        entry: question, answer and metadata as the task made them.
        pattern: its first group is the answer, and a response without a match has none; None: the whole response.
    """
    verifier = _verifier(task, json.dumps(task_args, sort_keys=True))
    return float(verifier.score_answer(extract(response, pattern), entry))


def extract(response: str, pattern: str | None) -> str | None:
    if pattern is None:
        return response.strip()
    match = re.search(pattern, response, re.DOTALL)
    return match[1].strip() if match and match[1] is not None else None


@lru_cache(maxsize=32)
def _verifier(task: str, task_args: str) -> reasoning_gym.dataset.ProceduralDataset:
    return reasoning_gym.create_dataset(task, **json.loads(task_args), size=1, seed=0)
