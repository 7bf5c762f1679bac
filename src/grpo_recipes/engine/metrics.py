"""What a step says of itself. Names and definitions are listed in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_recipes.engine.mismatch import Mismatch, WorstSequence
from grpo_recipes.engine.packing import PackingStats
from grpo_recipes.engine.rollouts import Rollout
from grpo_recipes.environments.contract import StepResult
from grpo_recipes.policy.contract import TrainStats
from grpo_recipes.runs.rollouts import Rollout as RolloutRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reward_metrics(
    rewards_GN: Tensor, valid_GN: Tensor, advantages_GN: Tensor, silent_G: Tensor, errors: Sequence[str | None]
) -> dict[str, float]:
    valid, advantages = rewards_GN[valid_GN], advantages_GN[valid_GN]
    metrics = {
        "train/zero_variance_fraction": float(silent_G.double().mean()),
        "train/grader_errors": float(sum(error is not None for error in errors)),
    }
    if len(valid):  # without a single judgement there is no reward, not a reward of 0
        metrics |= {
            "train/reward": float(valid.mean()),
            "train/reward_std": float(valid.std(correction=0)),
            "train/advantage_mean": float(advantages.mean()),
            "train/advantage_abs_mean": float(advantages.abs().mean()),
        }
    return metrics


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rollouts = [r for r in rollouts if r.completion.finish_reason != "abort"]
    if not rollouts:  # all of them were given up at the deadline
        return {}
    lengths = [len(r.completion.token_ids) for r in rollouts]
    return {
        "train/response_length_mean": sum(lengths) / len(lengths),
        "train/response_length_max": float(max(lengths)),
        "train/prompt_length_mean": sum(len(r.prompt_ids) for r in rollouts) / len(rollouts),
        "train/truncated_fraction": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
    }


def refit_throughput(stats: Any) -> dict[str, float]:
    """Of the RefitStats of a refit that moved bytes."""
    if stats is None or not stats.bytes:
        return {}
    found = {
        "refit_bytes": float(stats.bytes),
        "refit_tensors": float(stats.tensors),
        "refit_gb_per_s": stats.bytes / stats.seconds / 1e9,
    }
    if stats.certified:
        found["refit_certify"] = stats.certify_seconds
    if stats.largest_gap is not None:
        found["refit_probe_gap"] = stats.largest_gap
    return found


def packing_metrics(stats: PackingStats) -> dict[str, float]:
    return {
        "train/padding_fraction": stats.padding_fraction,
        "train/rank_imbalance": stats.rank_imbalance,
        "train/microbatches": stats.microbatches,
    }


def training_metrics(stats: Sequence[TrainStats], mismatch: Mismatch, tokens: int) -> dict[str, float]:
    """Means over the optimizer steps of the batch that were taken, and over their generated tokens."""
    taken = [s for s in stats if not s.skipped]
    count = max(len(taken), 1)

    def token_mean(name: str) -> float:
        return sum(s.sums[name] for s in taken) / sum(s.sums["tokens"] for s in taken)

    metrics = {
        "train/loss": sum(s.loss for s in taken) / count,
        "train/grad_norm": sum(s.grad_norm for s in taken) / count,
        "train/learning_rate": stats[-1].learning_rate,
        "train/bad_steps": float(len(stats) - len(taken)),
        "train/valid_tokens": float(tokens),
        **mismatch.metrics(),
    }
    if taken:
        metrics |= {
            "train/clip_fraction": token_mean("clipped"),
            "train/ratio_mean": token_mean("ratio"),
            "train/ratio_max": max(s.maxima["ratio"] for s in taken),
            "train/entropy": token_mean("entropy"),
        }
        if "kl" in taken[0].sums:
            metrics["train/kl"] = token_mean("kl")
    return metrics


def expert_load_metrics(stats: Sequence[TrainStats], *, each: bool) -> dict[str, float]:
    """The largest and smallest share of a layer's tokens that went to one expert, in multiples of an even share, means
    over the optimizer steps of the batch; with `each` that of every expert, too. Nothing for a dense model."""
    if not stats[0].expert_load:
        return {}
    load_LE = torch.tensor([s.expert_load for s in stats], dtype=torch.float64).mean(0)
    layers = [layer for layer, load_E in enumerate(load_LE) if load_E.any()]  # those that have experts
    metrics = {
        "train/expert_load_max": float(load_LE[layers].max()),
        "train/expert_load_min": float(load_LE[layers].min()),
    }
    if each:
        metrics |= {
            f"train/expert_load/layer_{layer}/expert_{expert}": load
            for layer in layers
            for expert, load in enumerate(load_LE[layer].tolist())
        }
    return metrics


def rollout_records(
    rollouts: Sequence[Rollout],
    result: StepResult,
    advantages_GN: Tensor,
    most: int,
    tokenizer: PreTrainedTokenizerBase,
    worst: Mapping[int, WorstSequence],
) -> list[RolloutRecord]:
    """The first `most` rollouts as a person reads them, and, if any are wanted, those of which sampler and trainer
    differ most: `worst`, by place among the rollouts."""
    shown = range(min(most, len(rollouts)))
    advantages = advantages_GN.view(-1).tolist()
    per_prompt = advantages_GN.shape[1]
    return [
        RolloutRecord(
            prompt=tokenizer.decode(rollout.prompt_ids),
            response=rollout.response,
            reward=result.rewards[n],
            advantage=advantages[n],
            finish_reason=rollout.completion.finish_reason,
            token_ids=tuple(rollout.completion.token_ids.tolist()),
            logprobs=tuple(rollout.completion.logprobs.tolist()),
            tokens=tuple(tokenizer.decode([token]) for token in rollout.completion.token_ids.tolist()),
            answer=rollout.example.answer,
            error=result.errors[n] or "",
            group=n // per_prompt,
            row=rollout.example.index,
            trainer_logprobs=tuple(worst[n].logprobs.tolist()) if n in worst else (),
            mult_prob_error=worst[n].error if n in worst else None,
        )
        for n in (*shown, *(n for n in sorted(worst) if most and n not in shown))
        for rollout in (rollouts[n],)
    ]
