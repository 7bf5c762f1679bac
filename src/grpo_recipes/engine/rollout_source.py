"""Where the rollouts of a step come from. The step only sees `next`: whole groups, whoever drew them and when.

In step, one-off, n-off: engine/drawn_rollouts.py. From another run's folder: engine/stored_rollouts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from grpo_recipes.engine.rollouts import Rollout
from grpo_recipes.environments.contract import StepResult

if TYPE_CHECKING:
    from grpo_recipes.data.sampler import SamplerState
    from grpo_recipes.engine.parts import LoopState


@dataclass(frozen=True)
class RolloutBatch:
    """G groups of N rollouts. A group's number is its prompt's place in the order of the data over the whole run, from
    0; groups come by ascending number, and the rollouts of one after the other."""

    groups: tuple[int, ...]
    rollouts: list[Rollout]  # [G * N]
    sampler: SamplerState  # after what has been asked for
    result: StepResult | None = None  # where they are judged already
    pending: tuple[int, ...] = ()  # numbers of groups asked for and not in this or an earlier batch
    arrived: tuple[int, ...] = ()  # `groups` in the order in which they were complete, where that may vary
    metrics: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)  # seconds
    seconds: float | None = None  # since the batch before, where this one was drawn all the while


class RolloutSource(Protocol):
    def next(self, state: LoopState) -> RolloutBatch:
        """The rollouts of the step after `state`.

        Raises:
            Interrupted: a stop was asked for.
            GeneratorStalled: nothing has arrived for too long.
        """

    def refit(self, version: int) -> Any:
        """The trainer's weights have become `version`: bring them to whatever draws. Returns RefitStats, or None."""
