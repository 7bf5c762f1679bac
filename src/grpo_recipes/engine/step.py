"""One GRPO step, to be read from top to bottom.

prompts -> rollouts -> rewards -> advantages -> batch -> old and reference logprobs -> optimizer steps -> refit -> metrics
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from grpo_recipes.engine.advantages import group_advantages, zero_variance_groups
from grpo_recipes.engine.batch import Sample, make_batch, split_evenly
from grpo_recipes.engine.metrics import (
    expert_load_metrics,
    packing_metrics,
    refit_throughput,
    reward_metrics,
    rollout_metrics,
    rollout_records,
    training_metrics,
)
from grpo_recipes.engine.mismatch import BatchRefused, WorstSequence, check_limits
from grpo_recipes.engine.parts import Arrival, LoopState, Parts, StepOutcome
from grpo_recipes.engine.phases import Phases
from grpo_recipes.engine.rollouts import judge, reward_tensors, to_store


def grpo_step(parts: Parts, state: LoopState, phase: Phases) -> StepOutcome:
    """Everything from drawing prompts to refit. Returns the state after the step; `parts` carries the weights."""
    recipe = parts.recipe
    grpo, policy, loss_fn = recipe.grpo, recipe.policy, recipe.loss_fn
    assert grpo is not None and parts.rollouts is not None
    per_prompt = grpo.num_generations_per_prompt

    with phase("generation"):
        drawn = parts.rollouts.next(state)  # in step with training, ahead of it, or out of a folder
        rollouts = drawn.rollouts

    with phase("reward"):
        result = drawn.result or judge(parts, rollouts)
        rewards_GN, valid_GN = reward_tensors(result, per_prompt)
        if grpo.shuffle_rewards:  # the control experiment: the same rewards, for the wrong responses
            order = torch.randperm(rewards_GN.numel(), generator=torch.Generator().manual_seed(grpo.seed + state.step))
            rewards_GN = rewards_GN.view(-1)[order].view_as(rewards_GN)
            valid_GN = valid_GN.view(-1)[order].view_as(valid_GN)

    advantages_GN = group_advantages(
        rewards_GN, valid_GN, leave_one_out=grpo.use_leave_one_out_baseline, normalize=grpo.normalize_rewards
    )
    silent_G = zero_variance_groups(rewards_GN, valid_GN)
    trained_GN = valid_GN & ~silent_G[:, None] if grpo.drop_zero_variance_groups else valid_GN
    chosen = trained_GN.view(-1).nonzero().view(-1).tolist()
    samples = [
        Sample(rollouts[n].prompt_ids, rollouts[n].completion.token_ids, rollouts[n].completion.logprobs, advantage)
        for n, advantage in zip(chosen, advantages_GN.view(-1)[chosen].tolist(), strict=True)
    ]
    metrics = {
        **reward_metrics(rewards_GN, valid_GN, advantages_GN, silent_G, result.errors),
        **rollout_metrics(rollouts),
        **drawn.metrics,
        "train/epoch": float((state.step + 1) * grpo.num_prompts_per_step // len(parts.train)),
        "train/weight_version": float(state.weight_version),
    }

    # As many optimizer steps as a full rollout batch has; those left after filtering are shared out evenly.
    planned = grpo.num_prompts_per_step * per_prompt // policy.train_global_batch_size
    optimizer_steps = split_evenly(len(samples), planned)
    stats = []
    worst: dict[int, WorstSequence] = {}

    def outcome(after: LoopState, throughput: dict[str, float], tokens: int) -> StepOutcome:
        kept = recipe.logger.num_rollouts_to_keep
        return StepOutcome(
            after,
            metrics,
            throughput,
            tokens,
            rollout_records(rollouts, result, advantages_GN, kept, parts.tokenizer, worst),
            to_store(drawn.groups, rollouts, result, step=after.step, weight_version=state.weight_version),
            Arrival(drawn.arrived, drawn.pending) if drawn.arrived else None,
        )

    if samples:
        batch = make_batch(samples, optimizer_steps, token_level=loss_fn.token_level_loss)
        metrics |= packing_metrics(parts.policy.load_batch(batch, optimizer_steps))
        with phase("logprobs"):
            mismatch = parts.policy.compute_logprobs(parts.correction)
        worst = {chosen[w.sequence]: w for w in mismatch.worst}
        try:
            rows = [rollouts[n].example.index for n in chosen]
            warnings = check_limits(mismatch, loss_fn.mismatch, state.step + 1, rows)
        except BatchRefused as refused:
            refused.outcome = outcome(replace(state, step=state.step + 1), {}, 0)._replace(arrival=None)
            raise
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        if loss_fn.reference_policy_kl_penalty > 0:
            with phase("reference_logprobs"):
                parts.policy.compute_reference_logprobs()
        with phase("policy_training"):
            stats = [parts.policy.train(step, parts.loss) for step in range(len(optimizer_steps))]
        metrics |= training_metrics(stats, mismatch, int(batch.mask.sum()))
        metrics |= expert_load_metrics(stats, each=recipe.logger.load_of_every_expert)

    version = state.weight_version + sum(not s.skipped for s in stats)
    with phase("refit"):
        refit = parts.rollouts.refit(version)

    bad_steps = state.bad_steps if valid_GN.any() else state.bad_steps + 1  # a dead grader teaches nothing
    for s in stats:
        bad_steps = bad_steps + 1 if s.skipped else 0
    generated = sum(len(r.completion.token_ids) for r in rollouts)
    trained = sum(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    throughput = {
        "training_tokens_per_s": trained / phase.seconds["policy_training"] if samples else 0.0,
        **drawn.timing,
        **refit_throughput(refit),
    }
    if drawn.result is None:
        throughput["generation_tokens_per_s"] = generated / (drawn.seconds or phase.seconds["generation"])
    after = replace(
        state,
        step=state.step + 1,
        sampler=drawn.sampler,
        pending=drawn.pending,
        weight_version=version,
        bad_steps=bad_steps,
    )
    return outcome(after, throughput, generated + trained)
