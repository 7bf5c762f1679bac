"""What a run is made of, once everything is loaded, and the state that a step hands to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from grpo_recipes.data.dataset import Dataset
from grpo_recipes.data.sampler import SamplerState
from grpo_recipes.engine.importance import Correction
from grpo_recipes.engine.inbox import Inbox
from grpo_recipes.engine.policy_group import PolicyGroup
from grpo_recipes.engine.rollout_source import RolloutSource
from grpo_recipes.environments.contract import Environment
from grpo_recipes.policy.contract import Loss
from grpo_recipes.recipe.schema import Recipe
from grpo_recipes.runs.rollout_store import StoredRollouts
from grpo_recipes.runs.rollouts import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompts:
    """A dataset ready to be sampled from: example i is asked as prompt_ids[i]. Too long prompts are already out."""

    examples: Dataset
    prompt_ids: Sequence[tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.prompt_ids)


@dataclass(frozen=True)
class Parts:
    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    train: Prompts
    validation: Prompts
    environment: Environment
    inbox: Inbox | None  # of the generator; None where nothing is drawn
    rollouts: RolloutSource | None  # None: supervised
    policy: PolicyGroup
    loss: Loss
    correction: Correction | None  # of the loss, for the distribution that tokens were drawn by
    refit: Callable[[int], None]  # bring the trainer's weights to the generator, as the given version
    check_stop: Callable[[str], None]  # raises Interrupted if the named phase may be abandoned and a stop was asked for


@dataclass(frozen=True)
class LoopState:
    """Everything outside the policy that a resumed run needs."""

    step: int  # completed steps
    sampler: SamplerState
    weight_version: int  # optimizer steps taken, one refit each at most
    bad_steps: int  # consecutive optimizer steps skipped because something was not finite
    pending: tuple[int, ...] = ()  # numbers of groups that were asked for and not trained on yet


class Arrival(NamedTuple):
    """Which groups a step trained on, where that depends on when they came."""

    groups: tuple[int, ...]  # numbers, in the order in which they were complete
    pending: tuple[int, ...]  # asked for and left for later steps


class StepOutcome(NamedTuple):
    state: LoopState
    metrics: dict[str, float]  # must repeat exactly
    throughput: dict[str, float]  # tokens per second
    tokens: int  # generated and trained
    records: list[Rollout]  # some rollouts, for people to read
    stored: StoredRollouts | None = None  # all of them
    arrival: Arrival | None = None
