"""Prompts in, judged responses out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_recipes.engine.parts import Parts, Prompts
from grpo_recipes.environments.contract import Example, StepResult
from grpo_recipes.generation.contract import Completion, Request, Sampling
from grpo_recipes.generation.seeds import sample_seed


@dataclass(frozen=True)
class Rollout:
    example: Example
    prompt_ids: tuple[int, ...]
    completion: Completion
    response: str


def roll_out(
    parts: Parts,
    prompts: Prompts,
    indices: Sequence[int],
    *,
    per_prompt: int,
    temperature: float,
    step: int,
    run_seed: int,
) -> list[Rollout]:
    """`per_prompt` responses to each prompt, prompt by prompt. The seed of each is a function of all arguments."""
    generation = parts.recipe.policy.generation
    sampling = Sampling(temperature, generation.max_new_tokens, parts.stop_token_ids)
    requests = [
        Request(
            request_id=position * per_prompt + sample,
            prompt_ids=prompts.prompt_ids[index],
            seed=sample_seed(run_seed, step, position, sample),
            sampling=sampling,
        )
        for position, index in enumerate(indices)
        for sample in range(per_prompt)
    ]
    parts.generator.submit(requests)
    done: dict[int, Completion] = {}
    for completion in parts.generator.completions():
        parts.check_stop("generation")
        done[completion.request_id] = completion
    texts = parts.tokenizer.batch_decode(
        [done[request.request_id].token_ids for request in requests], skip_special_tokens=True
    )
    return [
        Rollout(prompts.examples[indices[n // per_prompt]], request.prompt_ids, done[request.request_id], text)
        for n, (request, text) in enumerate(zip(requests, texts, strict=True))
    ]


def judge(parts: Parts, rollouts: Sequence[Rollout]) -> StepResult:
    return parts.environment.step([r.example for r in rollouts], [r.response for r in rollouts])


def reward_tensors(result: StepResult, per_prompt: int) -> tuple[Tensor, Tensor]:
    """rewards float64 [G, N] (0 where the grader failed) and valid bool [G, N]."""
    valid = torch.tensor([reward is not None for reward in result.rewards])
    rewards = torch.tensor([reward or 0.0 for reward in result.rewards], dtype=torch.float64)
    return rewards.view(-1, per_prompt), valid.view(-1, per_prompt)
