"""Per-token log-probability and entropy from logits. Pure functions.

    z = logits / temperature, less its maximum        L = log sum_v exp z_v
    logprob(t) = z_t - L                              entropy = L - sum_v softmax(z)_v z_v

All arithmetic in float32 whatever the dtype of the logits, a chunk of tokens at a time, so that no float32 array of
tokens x vocabulary exists. With a process group, the vocabulary is split over its ranks (tensor parallelism).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22  # float32 logits held at once: 16 MiB


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Differentiable in `logits` once.

    Args:
        logits: [T, V], or this rank's columns [vocab_start, vocab_start + V) where `group` is given. No padding columns.
        targets: int64 [T], ids in the whole vocabulary.
        temperature: divides the logits; positive.
        group: ranks that hold the other columns.

    Returns:
        float32 [2, T]: log-probability (natural log) of each target, entropy (nats) of each distribution.
    """
    return _LogprobsAndEntropy.apply(logits, targets, temperature, vocab_start, group, chunk_elements)


def _reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


def _chunks(tokens: int, vocab: int, chunk_elements: int) -> list[slice]:
    size = max(1, chunk_elements // max(1, vocab))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, vocab_start, group, chunk_elements):
        tokens, vocab = logits.shape
        local = targets - vocab_start
        mine = (local >= 0) & (local < vocab)
        local = local.clamp(0, max(0, vocab - 1))
        out = torch.empty(2, tokens, dtype=torch.float32, device=logits.device)
        largest, log_total = torch.empty(2, tokens, dtype=torch.float32, device=logits.device)
        for part in _chunks(tokens, vocab, chunk_elements):
            # Everything is taken relative to the largest logit: adding it back would cost digits.
            z = logits[part].float() / temperature
            largest[part] = _reduce(z.amax(-1), dist.ReduceOp.MAX, group)
            z -= largest[part, None]
            chosen = z.gather(1, local[part, None]).squeeze(1) * mine[part]
            exp = z.exp()
            sums = torch.stack((exp.sum(-1), exp.mul_(z).sum(-1), chosen))
            total, weighted, chosen = _reduce(sums, dist.ReduceOp.SUM, group)
            log_total[part] = total.log()
            out[0, part] = chosen - log_total[part]
            out[1, part] = log_total[part] - weighted / total
        ctx.save_for_backward(logits, local, mine, largest, log_total, out[1])
        ctx.temperature, ctx.chunk_elements = temperature, chunk_elements
        return out

    @staticmethod
    def backward(ctx, grad):
        # d logprob / dz_v = [v = t] - p_v;   d entropy / dz_v = -p_v (log p_v + entropy)
        logits, local, mine, largest, log_total, entropy = ctx.saved_tensors
        result = torch.empty_like(logits)
        for part in _chunks(*logits.shape, ctx.chunk_elements):
            g_logprob, g_entropy = grad[0, part], grad[1, part]
            logp = logits[part].float() / ctx.temperature - largest[part, None] - log_total[part, None]
            dz = -logp.exp() * (g_logprob[:, None] + g_entropy[:, None] * (logp + entropy[part, None]))
            dz.scatter_add_(1, local[part, None], (g_logprob * mine[part])[:, None])
            result[part] = dz / ctx.temperature
        return result, None, None, None, None, None
