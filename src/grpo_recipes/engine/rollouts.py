"""Prompts in, judged responses out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grpo_recipes.environments.contract import Example, StepResult
from grpo_recipes.generation.contract import Completion, GeneratorStalled, Request, Sampling
from grpo_recipes.generation.seeds import sample_seed
from grpo_recipes.recipe.schema import GRPOConfig, Recipe
from grpo_recipes.runs.rollout_store import FINISH_REASONS, StoredRollouts

if TYPE_CHECKING:
    from grpo_recipes.engine.parts import Parts, Prompts

POLL_S = 1.0  # a stop signal is heard this soon


@dataclass(frozen=True)
class Rollout:
    example: Example
    prompt_ids: tuple[int, ...]
    completion: Completion
    response: str
    seed: int


def answer_each(
    parts: Parts, prompts: Prompts, count: int, *, temperature: float, step: int, seed: int
) -> list[Rollout]:
    """One response to each of the first `count` prompts. The seed of each is a function of `seed`, `step` and place."""
    assert parts.inbox is not None
    sampling = Sampling(temperature, parts.recipe.policy.generation.max_new_tokens, parts.stop_token_ids)
    requests = [Request(-1 - n, prompts.prompt_ids[n], sample_seed(seed, step, n, 0), sampling) for n in range(count)]
    parts.inbox.submit(requests)
    done: dict[int, Completion] = {}
    waiting = {request.request_id for request in requests}
    heard = time.monotonic()
    while waiting:
        parts.check_stop("generation")
        found = parts.inbox.take(waiting, POLL_S)
        done |= {completion.request_id: completion for completion in found}
        waiting -= done.keys()
        now = time.monotonic()
        if found:
            heard = now
        elif now - heard >= watchdog_s(parts.recipe):
            raise GeneratorStalled(
                f"nothing has come from the generator for {now - heard:.0f} s (grpo.rollout_watchdog_s); missing in the "
                f"evaluation: problems {', '.join(str(-1 - n) for n in sorted(waiting, reverse=True)[:20])}"
            )
    texts = parts.tokenizer.batch_decode([done[r.request_id].token_ids for r in requests], skip_special_tokens=True)
    return [
        Rollout(prompts.examples[n], request.prompt_ids, done[request.request_id], text, request.seed)
        for n, (request, text) in enumerate(zip(requests, texts, strict=True))
    ]


def watchdog_s(recipe: Recipe) -> float:
    return (recipe.grpo or GRPOConfig(max_num_steps=1)).rollout_watchdog_s


def judge(parts: Parts, rollouts: Sequence[Rollout]) -> StepResult:
    """What was given up at a deadline is not judged: it has neither a reward nor an error."""
    whole = [n for n, r in enumerate(rollouts) if r.completion.finish_reason != "abort"]
    found = parts.environment.step([rollouts[n].example for n in whole], [rollouts[n].response for n in whole])
    if len(whole) == len(rollouts):
        return found
    result = StepResult([None] * len(rollouts), [None] * len(rollouts), [None] * len(rollouts), [{} for _ in rollouts])
    for place, n in enumerate(whole):
        for spread, values in zip(result, found, strict=True):
            spread[n] = values[place]  # type: ignore[index,call-overload]
    return result


def reward_tensors(result: StepResult, per_prompt: int) -> tuple[Tensor, Tensor]:
    """rewards float64 [G, N] (0 where the grader failed) and valid bool [G, N]."""
    valid = torch.tensor([reward is not None for reward in result.rewards])
    rewards = torch.tensor([reward or 0.0 for reward in result.rewards], dtype=torch.float64)
    return rewards.view(-1, per_prompt), valid.view(-1, per_prompt)


def to_store(
    groups: Sequence[int], rollouts: Sequence[Rollout], result: StepResult, *, step: int, weight_version: int
) -> StoredRollouts:
    """All rollouts of `step` (counted from 1). The folder's writer adds the recipe's digest."""
    per_prompt = len(rollouts) // len(groups)

    def flat(tensors: list[Tensor]) -> np.ndarray:
        return torch.cat(tensors).numpy()

    completions = [r.completion for r in rollouts]
    return StoredRollouts(
        step=step,
        weight_version=weight_version,
        recipe_digest="",
        prompt_ids=np.array([token for r in rollouts for token in r.prompt_ids], np.int32),
        prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], np.int32),
        response_ids=flat([c.token_ids for c in completions]).astype(np.int32),
        response_lengths=np.array([len(c.token_ids) for c in completions], np.int32),
        logprobs=flat([c.logprobs for c in completions]),
        weight_versions=flat([c.weight_versions for c in completions]),
        example=np.array([r.example.index for r in rollouts], np.int32),
        group=np.repeat(np.array(groups, np.int64), per_prompt),
        sample=np.tile(np.arange(per_prompt, dtype=np.int32), len(groups)),
        seed=np.array([r.seed for r in rollouts], np.int64),
        reward=np.array([reward or 0.0 for reward in result.rewards], np.float64),
        valid=np.array([reward is not None for reward in result.rewards]),
        finish_reason=np.array([FINISH_REASONS.index(c.finish_reason) for c in completions], np.uint8),
    )
