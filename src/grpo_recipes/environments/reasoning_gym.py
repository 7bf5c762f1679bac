"""reasoning-gym tasks, scored by their own verifiers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_recipes.environments.contract import Example, StepResult
from grpo_recipes.environments.pool import GraderPool
from grpo_recipes.environments.verdicts import step_result
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import ReasoningGymEnvConfig


class ReasoningGymEnvironment:
    """One turn. The reward is the verifier's number as it is: some tasks give a little for a wrong answer.

    Verifiers run outside the trainer, because several of them evaluate the response as code.
    """

    def __init__(self, config: ReasoningGymEnvConfig) -> None:
        self._pattern = config.answer_pattern
        _check_pattern(self._pattern)
        grader = "grpo_recipes.environments.reasoning_gym_grader:grade"
        self._pool = GraderPool(grader, config.num_workers, config.timeout_s, chunk=32)

    def reset(self, examples: Sequence[Example]) -> list[str]:
        return [example.question for example in examples]

    def step(self, examples: Sequence[Example], responses: Sequence[str]) -> StepResult:
        tasks = [
            (
                example.metadata["task"],
                example.metadata["task_args"],
                example.metadata["entry"],
                self._pattern,
                response,
            )
            for example, response in zip(examples, responses, strict=True)
        ]
        return step_result(self._pool.grade(tasks), "score")

    def close(self) -> None:
        self._pool.close()


def _check_pattern(pattern: str | None) -> None:
    if pattern is None:
        return
    where = "env.reasoning_gym.answer_pattern"
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise UserError(f"not a regular expression: {error}", where=where) from error
    if not groups:
        raise UserError(
            "the pattern has no group", where=where, mend="put the answer in parentheses: <answer>(.*?)</answer>"
        )
