"""A step of `--rollout-only`: draw, judge, store. Weights stay as they are."""

from __future__ import annotations

from dataclasses import replace

from grpo_recipes.engine.advantages import group_advantages, zero_variance_groups
from grpo_recipes.engine.metrics import reward_metrics, rollout_metrics, rollout_records
from grpo_recipes.engine.parts import LoopState, Parts, StepOutcome
from grpo_recipes.engine.phases import Phases
from grpo_recipes.engine.rollouts import judge, reward_tensors, to_store


def rollout_step(parts: Parts, state: LoopState, phase: Phases) -> StepOutcome:
    recipe = parts.recipe
    assert recipe.grpo is not None and parts.rollouts is not None
    grpo = recipe.grpo
    with phase("generation"):
        drawn = parts.rollouts.next(state)
    with phase("reward"):
        result = judge(parts, drawn.rollouts)
    rewards_GN, valid_GN = reward_tensors(result, grpo.num_generations_per_prompt)
    advantages_GN = group_advantages(
        rewards_GN, valid_GN, leave_one_out=grpo.use_leave_one_out_baseline, normalize=grpo.normalize_rewards
    )
    silent_G = zero_variance_groups(rewards_GN, valid_GN)
    metrics = {
        **reward_metrics(rewards_GN, valid_GN, advantages_GN, silent_G, result.errors),
        **rollout_metrics(drawn.rollouts),
        **drawn.metrics,
    }
    generated = sum(len(r.completion.token_ids) for r in drawn.rollouts)
    return StepOutcome(
        state=replace(
            state,
            step=state.step + 1,
            sampler=drawn.sampler,
            pending=drawn.pending,
            bad_steps=0 if valid_GN.any() else state.bad_steps + 1,
        ),
        metrics=metrics,
        throughput={
            "generation_tokens_per_s": generated / (drawn.seconds or phase.seconds["generation"]),
            **drawn.timing,
        },
        tokens=generated,
        records=rollout_records(
            drawn.rollouts, result, advantages_GN, recipe.logger.num_rollouts_to_keep, parts.tokenizer, worst={}
        ),
        stored=to_store(drawn.groups, drawn.rollouts, result, step=state.step + 1, weight_version=state.weight_version),
    )
