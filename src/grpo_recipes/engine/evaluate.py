"""Accuracy on held-out problems."""

from __future__ import annotations

import math

from grpo_recipes.engine.parts import Parts
from grpo_recipes.engine.rollouts import answer_each, judge

# Evaluations draw from streams of their own, apart from those of training steps with the same number.
EVALUATION_STREAM = 1 << 32


def evaluate(parts: Parts, step: int, *, problems: int, run_seed: int, greedy: bool) -> dict[str, float]:
    """pass@1: the mean reward 1 of one sample per problem at the recipe's temperature, and its standard error.

    The standard error is sqrt(p (1 - p) / n), of a mean of n independent successes. A problem whose grader failed is
    left out and counted. With `greedy`, the share solved by the most likely tokens is added.
    """
    count = min(problems, len(parts.validation))
    metrics: dict[str, float] = {"val/num_problems": float(count)}
    temperatures = [("val/", parts.recipe.policy.generation.temperature)] + [("val/greedy_", 0.0)] * greedy
    for prefix, temperature in temperatures:
        rollouts = answer_each(
            parts, parts.validation, count, temperature=temperature, step=EVALUATION_STREAM + step, seed=run_seed
        )
        result = judge(parts, rollouts)
        rewards = [reward for reward in result.rewards if reward is not None]
        metrics[f"{prefix}grader_errors"] = float(count - len(rewards))
        if rewards:  # without a single judgement there is no accuracy, not an accuracy of 0
            accuracy = sum(reward >= 1.0 for reward in rewards) / len(rewards)
            metrics[f"{prefix}accuracy"] = accuracy
            metrics[f"{prefix}accuracy_stderr"] = math.sqrt(accuracy * (1 - accuracy) / len(rewards))
        if temperature > 0:
            lengths = [len(r.completion.token_ids) for r in rollouts]
            metrics["val/response_length_mean"] = sum(lengths) / count
            if rewards:
                metrics["val/reward"] = sum(rewards) / len(rewards)
    return metrics
