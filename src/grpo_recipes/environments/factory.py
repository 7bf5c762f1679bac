"""The environment that a recipe names."""

from __future__ import annotations

from grpo_recipes.environments.contract import Environment
from grpo_recipes.environments.math import MathEnvironment
from grpo_recipes.environments.reasoning_gym import ReasoningGymEnvironment
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import DataConfig, EnvConfig


def make_environment(env: EnvConfig, data: DataConfig) -> Environment:
    """Starts worker processes; `close` ends them.

    Raises:
        UserError: the environment cannot judge the dataset.
    """
    if data.env_name == "math":
        return MathEnvironment(env.math)
    for role in ("train", "validation"):
        dataset = getattr(data, role).dataset_name
        if dataset != "reasoning_gym":
            raise UserError(
                f"the reasoning_gym environment cannot judge dataset_name {dataset}: it has no verifier for it",
                where=f"data.{role}.dataset_name",
                mend="set data.env_name to math, or use a reasoning_gym dataset",
            )
    return ReasoningGymEnvironment(env.reasoning_gym)
