"""Context parallelism: which tokens of a pack a rank holds, and how ranks put theirs together. Plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextShard:
    """This rank's place in context parallelism: of every sequence, cut into 2 x size equal chunks, it holds chunk
    `rank` and chunk 2 x size - 1 - `rank`, so that all ranks have the same work under a causal mask."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def token_runs(self, lengths: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Two runs for each sequence, int64 [2 S] each: first token in the pack, tokens, and position of the first
        token in its sequence. Lengths are multiples of 2 x size."""
        starts, chunk = lengths.cumsum(0) - lengths, lengths // (2 * self.size)
        first = torch.stack((rank * chunk, (2 * self.size - 1 - rank) * chunk), dim=1)
        return (starts[:, None] + first).flatten(), chunk.repeat_interleave(2), first.flatten()


def gather_keys(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, ...] of every rank -> [size x N, ...]. Every rank uses the result for queries of its own, so gradients are
    summed over the ranks on the way back."""
    return _GatherKeys.apply(x, group)


def gather_outputs(x: Tensor, natural: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., N] of every rank -> [..., T] in the order of the pack. Every rank computes the same of the result, so each
    takes its own part of the gradient and nothing is summed.

    Args:
        natural: int64 [T], where each token of the pack lies among the gathered.
    """
    return _GatherOutputs.apply(x, natural, group)


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, natural, group):
        ctx.save_for_backward(natural)
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)[..., natural]

    @staticmethod
    def backward(ctx, grad):
        (natural,) = ctx.saved_tensors
        gathered = torch.empty_like(grad)
        gathered[..., natural] = grad
        return gathered.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None, None
