"""Per-token log-probability and entropy from logits. Pure functions.

    z = logits / temperature, less its maximum        L = log sum_v exp z_v
    logprob(t) = z_t - L                              entropy = L - sum_v softmax(z)_v z_v

All arithmetic in float32 whatever the dtype of the logits, and no float32 array of tokens x vocabulary exists: a chunk
of tokens at a time in plain PyTorch, in registers on CUDA (logprobs_triton.py). With a process group the vocabulary is
split over its ranks (tensor parallelism); they exchange four numbers a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22  # float32 logits held at once: 16 MiB
LOWEST = -1e30  # stands for the maximum of no columns


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Differentiable in `logits` once. The gradient takes the place of the logits: backward overwrites them.

    Args:
        logits: [T, V], or this rank's columns [vocab_start, vocab_start + V) where `group` is given. No padding columns.
        targets: int64 [T], ids in the whole vocabulary.
        temperature: divides the logits; positive.
        group: ranks that hold the other columns.

    Returns:
        float32 [2, T]: log-probability (natural log) of each target, entropy (nats) of each distribution.
    """
    return _LogprobsAndEntropy.apply(logits, targets, temperature, vocab_start, group, chunk_elements)


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, vocab_start, group, chunk_elements):
        local = targets - vocab_start  # outside [0, V) where another rank holds the target
        statistics, _ = kernels(logits, chunk_elements)
        largest, total, weighted, chosen = combine(statistics(logits, local, temperature), group)
        log_total = total.log()
        out = torch.stack((chosen - log_total, log_total - weighted / total))
        ctx.save_for_backward(logits, local, largest, log_total, out[1])
        ctx.temperature, ctx.chunk_elements = temperature, chunk_elements
        return out

    @staticmethod
    def backward(ctx, grad):
        logits, local, largest, log_total, entropy = ctx.saved_tensors
        _, differentiate = kernels(logits, ctx.chunk_elements)
        differentiate(logits, local, ctx.temperature, largest, log_total, entropy, grad)
        return logits, None, None, None, None, None


def combine(statistics_4T: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Statistics of the ranks' columns -> of the whole vocabulary, float32 [4, T] (see `row_statistics`)."""
    if group is None or group.size() == 1:
        return statistics_4T
    largest = statistics_4T[0].clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    lower, total, weighted, chosen = statistics_4T
    shift = lower - largest
    sums = torch.stack((total * shift.exp(), shift.exp() * (weighted + shift * total), chosen))
    # The target's logit counts on the rank that holds it.
    sums[2] = torch.where(chosen.isnan(), 0.0, chosen + shift)
    dist.all_reduce(sums, group=group)
    return torch.cat((largest[None], sums))


def kernels(logits: Tensor, chunk_elements: int):
    """The two functions below, for this device."""
    if logits.is_cuda:
        from grpo_recipes.policy import logprobs_triton

        return logprobs_triton.row_statistics, logprobs_triton.differentiate

    def statistics(logits, local, temperature):
        return row_statistics(logits, local, temperature, chunk_elements)

    def gradient(logits, local, temperature, largest, log_total, entropy, grad):
        differentiate(logits, local, temperature, largest, log_total, entropy, grad, chunk_elements)

    return statistics, gradient


def row_statistics(logits: Tensor, local: Tensor, temperature: float, chunk_elements: int) -> Tensor:
    """Of each row of z = logits / temperature, float32 [4, T]: its maximum m, sum exp(z - m), sum exp(z - m) (z - m),
    and z[target] - m, which is NaN where the target lies outside the columns. Taken relative to the maximum, because
    adding it back would cost digits."""
    tokens, vocab = logits.shape
    inside = (local >= 0) & (local < vocab)
    out = torch.empty(4, tokens, dtype=torch.float32, device=logits.device)
    if not vocab:  # a tensor-parallel rank may hold nothing but padding
        return out.copy_(torch.tensor([LOWEST, 0.0, 0.0, torch.nan])[:, None])
    for part in _chunks(tokens, vocab, chunk_elements):
        z = logits[part].float() / temperature
        out[0, part] = z.amax(-1)
        z -= out[0, part, None]
        chosen = z.gather(1, local[part, None].clamp(0, vocab - 1)).squeeze(1)
        out[3, part] = chosen.masked_fill(~inside[part], torch.nan)
        exp = z.exp()
        out[1, part] = exp.sum(-1)
        out[2, part] = exp.mul_(z).sum(-1)
    return out


def differentiate(
    logits: Tensor,
    local: Tensor,
    temperature: float,
    largest: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad: Tensor,
    chunk_elements: int,
) -> None:
    """Overwrite the logits with the gradient.

    d logprob / dz_v = [v = t] - p_v;   d entropy / dz_v = -p_v (log p_v + entropy);   log p_v = z_v - largest - log_total
    """
    tokens, vocab = logits.shape
    inside = (local >= 0) & (local < vocab)
    for part in _chunks(tokens, vocab, chunk_elements) if vocab else ():
        g_logprob, g_entropy = grad[0, part], grad[1, part]
        logp = logits[part].float() / temperature - largest[part, None] - log_total[part, None]
        dz = -logp.exp() * (g_logprob[:, None] + g_entropy[:, None] * (logp + entropy[part, None]))
        dz.scatter_add_(1, local[part, None].clamp(0, vocab - 1), (g_logprob * inside[part])[:, None])
        logits[part] = dz / temperature


def _chunks(tokens: int, vocab: int, chunk_elements: int) -> list[slice]:
    size = max(1, chunk_elements // vocab)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
