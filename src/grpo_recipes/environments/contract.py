"""What the engine asks of a task: start episodes, judge responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Example:
    """One row of a dataset."""

    index: int  # row in its dataset
    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


class StepResult(NamedTuple):
    """One entry per episode in each list."""

    rewards: list[float | None]  # None: the grader failed or timed out; the sample is left out and counted
    observations: list[str | None]  # what the policy is told next; None ends the episode
    errors: list[str | None]  # why a reward is None
    components: list[dict[str, float]]  # named parts of the reward


class Environment(Protocol):
    def reset(self, examples: Sequence[Example]) -> list[str]:
        """The text each episode opens with."""

    def step(self, examples: Sequence[Example], responses: Sequence[str]) -> StepResult:
        """Judge the latest response of each episode."""

    def close(self) -> None:
        """End worker processes."""
