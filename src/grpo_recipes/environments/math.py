"""Mathematics with a reference answer: 1 if math-verify finds the response equal to it, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_recipes.environments.contract import Example, StepResult
from grpo_recipes.environments.pool import GraderPool
from grpo_recipes.environments.verdicts import step_result
from grpo_recipes.recipe.schema import MathEnvConfig


class MathEnvironment:
    """One turn. A response without any mathematics scores 0; one that could not be judged has no reward."""

    def __init__(self, config: MathEnvConfig) -> None:
        self._pool = GraderPool("grpo_recipes.environments.math_grader:grade", config.num_workers, config.timeout_s)

    def reset(self, examples: Sequence[Example]) -> list[str]:
        return [example.question for example in examples]

    def step(self, examples: Sequence[Example], responses: Sequence[str]) -> StepResult:
        tasks = [(example.answer, response) for example, response in zip(examples, responses, strict=True)]
        return step_result(self._pool.grade(tasks), "correct")

    def close(self) -> None:
        self._pool.close()
