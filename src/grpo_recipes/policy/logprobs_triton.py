"""The row functions of logprobs.py on CUDA: the logits are read once, and once more to be overwritten."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns held in registers at once
LOWEST = tl.constexpr(-1e30)  # stands for minus infinity, of which the difference with itself is no number


def row_statistics(logits: Tensor, local: Tensor, temperature: float) -> Tensor:
    """See logprobs.row_statistics."""
    tokens, vocab = logits.shape
    out = torch.empty(4, tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        _row_statistics[(tokens,)](
            logits, logits.stride(0), local, out, tokens, vocab, 1 / temperature, BLOCK=BLOCK, num_warps=8
        )
    return out


def differentiate(
    logits: Tensor,
    local: Tensor,
    temperature: float,
    largest: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad: Tensor,
) -> None:
    """See logprobs.differentiate."""
    tokens, vocab = logits.shape
    if tokens:
        _differentiate[(tokens,)](
            logits,
            logits.stride(0),
            local,
            largest,
            log_total,
            entropy.contiguous(),
            grad.contiguous(),
            tokens,
            vocab,
            1 / temperature,
            BLOCK=BLOCK,
            num_warps=8,
        )


@triton.jit
def _row_statistics(logits, stride, local, out, tokens, vocab, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = LOWEST
    total = 0.0
    weighted = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + row * stride + column, mask=column < vocab, other=LOWEST).to(tl.float32) * scale
        new = tl.maximum(largest, tl.max(z, 0))
        shift = largest - new
        factor = tl.exp(shift)
        z = tl.where(column < vocab, z - new, 0.0)
        exp = tl.where(column < vocab, tl.exp(z), 0.0)
        weighted = factor * (weighted + shift * total) + tl.sum(exp * z, 0)
        total = factor * total + tl.sum(exp, 0)
        largest = new
    target = tl.load(local + row)
    inside = (target >= 0) & (target < vocab)
    chosen = tl.load(logits + row * stride + target, mask=inside, other=0.0).to(tl.float32) * scale - largest
    tl.store(out + row, largest)
    tl.store(out + tokens + row, total)
    tl.store(out + 2 * tokens + row, weighted)
    tl.store(out + 3 * tokens + row, tl.where(inside, chosen, float("nan")))


@triton.jit
def _differentiate(logits, stride, local, largest, log_total, entropy, grad, tokens, vocab, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest = tl.load(largest + row)
    rest = tl.load(log_total + row)
    h = tl.load(entropy + row)
    g_logprob = tl.load(grad + row)
    g_entropy = tl.load(grad + tokens + row)
    target = tl.load(local + row)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        where = logits + row * stride + column
        logp = tl.load(where, mask=column < vocab, other=0.0).to(tl.float32) * scale - highest - rest
        dz = -tl.exp(logp) * (g_logprob + g_entropy * (logp + h))
        dz = tl.where(column == target, dz + g_logprob, dz)
        tl.store(where, (dz * scale).to(logits.dtype.element_ty), mask=column < vocab)
