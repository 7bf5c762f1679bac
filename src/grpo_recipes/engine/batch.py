"""From ragged Python samples to a `Batch`, and the weights that name the loss reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from grpo_recipes.policy.contract import Batch


@dataclass(frozen=True)
class Sample:
    """One sequence to train on: a prompt and what was generated after it."""

    prompt_ids: tuple[int, ...]
    response_ids: Tensor  # int64 [R]
    response_logprobs: Tensor  # float32 [R], by the sampler
    advantage: float


def loss_weights(mask_T: Tensor, lengths_S: Tensor, step_S: Tensor, *, token_level: bool) -> Tensor:
    """Each token's share of the loss of its optimizer step, float32 [T], summing to 1 over each step.

    Token level: 1 / (valid tokens of the whole step). Sequence level: 1 / (valid sequences of the step x valid tokens
    of the token's own sequence). Both are known before the batch is cut, so how it is cut into ranks and microbatches
    cannot change the gradient.

    Args:
        mask_T: bool [T] of all sequences of the rollout batch, on every rank.
        lengths_S: int64 [S].
        step_S: int64 [S], the optimizer step that each sequence belongs to, counted from 0.
    """
    valid_T = mask_T.double()
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
    valid_S = torch.zeros(len(lengths_S), dtype=torch.float64).index_add_(0, sequence_T, valid_T)
    share_S = torch.ones_like(valid_S) if token_level else (valid_S > 0) / valid_S.clamp(min=1)
    total_of_step = torch.zeros(int(step_S.max()) + 1, dtype=torch.float64).index_add_(0, step_S, share_S * valid_S)
    return (valid_T * (share_S / total_of_step.clamp(min=1)[step_S])[sequence_T]).float()


def make_batch(samples: Sequence[Sample], optimizer_steps: Sequence[Sequence[int]], *, token_level: bool) -> Batch:
    """All samples of one rollout batch. `optimizer_steps` names the samples of each optimizer step, all of them once."""
    prompt = torch.tensor([len(s.prompt_ids) for s in samples])
    lengths = prompt + torch.tensor([len(s.response_ids) for s in samples])
    position_T = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    mask = position_T >= torch.repeat_interleave(prompt, lengths)
    token_ids = torch.cat([t for s in samples for t in (torch.tensor(s.prompt_ids, dtype=torch.int64), s.response_ids)])
    logprobs = torch.zeros(len(mask)).masked_scatter_(mask, torch.cat([s.response_logprobs for s in samples]))
    advantages = torch.repeat_interleave(torch.tensor([s.advantage for s in samples]), lengths) * mask
    step_S = torch.empty(len(samples), dtype=torch.int64)
    for step, members in enumerate(optimizer_steps):
        step_S[list(members)] = step
    weights = loss_weights(mask, lengths, step_S, token_level=token_level)
    return Batch(token_ids, lengths, mask, weights, advantages, logprobs)


def split_evenly(count: int, parts: int) -> list[range]:
    """Consecutive ranges over `count` items, sizes differing by at most one; fewer parts if there are fewer items."""
    parts = min(parts, count)
    bounds = [count * i // parts for i in range(parts + 1)] if parts else [0]
    return [range(a, b) for a, b in pairwise(bounds)]
