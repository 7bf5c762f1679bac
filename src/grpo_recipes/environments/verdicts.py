"""What a one-turn environment answers."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_recipes.environments.contract import StepResult
from grpo_recipes.environments.pool import Verdict


def step_result(verdicts: Sequence[Verdict], component: str) -> StepResult:
    """Every episode ends; the score is the whole reward, named `component`."""
    return StepResult(
        rewards=[verdict.score for verdict in verdicts],
        observations=[None] * len(verdicts),
        errors=[verdict.error for verdict in verdicts],
        components=[{} if verdict.score is None else {component: verdict.score} for verdict in verdicts],
    )
