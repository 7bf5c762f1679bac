"""One supervised step: cross entropy on reference answers, through the same policy and loop as GRPO."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_recipes.data.prompts import encode_text
from grpo_recipes.data.sampler import next_indices
from grpo_recipes.engine.batch import Sample, make_batch
from grpo_recipes.engine.metrics import packing_metrics
from grpo_recipes.engine.parts import LoopState, Parts, StepOutcome
from grpo_recipes.engine.phases import Phases


def sft_step(parts: Parts, state: LoopState, phase: Phases) -> StepOutcome:
    recipe = parts.recipe
    size = recipe.policy.train_global_batch_size
    indices, sampler = next_indices(state.sampler, len(parts.train), size, recipe.data.shuffle)
    samples = []
    for index in indices:
        answer = encode_text(parts.train.examples[index].answer, parts.tokenizer, "answer")
        target = torch.tensor([*answer, parts.stop_token_ids[0]])
        samples.append(Sample(parts.train.prompt_ids[index], target, torch.zeros(len(target)), advantage=0.0))
    batch = make_batch(samples, [range(size)], token_level=recipe.loss_fn.token_level_loss)
    packing = parts.policy.load_batch(batch, [range(size)])
    with phase("policy_training"):
        stats = parts.policy.train(0, parts.loss)
    version = state.weight_version + (not stats.skipped)
    with phase("refit"):
        parts.refit(version)
    metrics = {
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/learning_rate": stats.learning_rate,
        "train/bad_steps": float(stats.skipped),
        "train/valid_tokens": float(batch.mask.sum()),
        "train/epoch": float(sampler.epoch),
        **packing_metrics(packing),
    }
    throughput = {"training_tokens_per_s": len(batch.token_ids) / phase.seconds["policy_training"]}
    after = replace(
        state,
        step=state.step + 1,
        sampler=sampler,
        weight_version=version,
        bad_steps=state.bad_steps + 1 if stats.skipped else 0,
    )
    return StepOutcome(after, metrics, throughput, len(batch.token_ids), [])
