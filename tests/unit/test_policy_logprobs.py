import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from grpo_recipes.policy.logprobs import logprobs_and_entropy


def reference(logits, targets, temperature):
    logp = (logits.double() / temperature).log_softmax(-1)
    return torch.stack((logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))


@pytest.mark.parametrize("chunk_elements", [1, 30, 64, 1 << 20])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_values_and_gradients_against_float64(chunk_elements, temperature):
    """Covers: temperature missing from one of the logprobs or from entropy."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(23, 11, generator=draw) * 6
    targets = torch.randint(0, 11, (23,), generator=draw)
    upstream = torch.randn(2, 23, generator=draw)
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = logprobs_and_entropy(mine, targets, temperature, chunk_elements=chunk_elements)
    wanted = reference(exact, targets, temperature)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
    (found * upstream).sum().backward()
    (wanted * upstream).sum().backward()
    torch.testing.assert_close(mine.grad.double(), exact.grad, atol=1e-5, rtol=0)


class TwoThreads:
    """As much of a process group as two threads need."""

    def __init__(self):
        self.barrier, self.given = threading.Barrier(2, timeout=10), {}

    def size(self):
        return 2

    def all_reduce(self, tensor, op):
        self.given[threading.get_ident()] = tensor.clone()
        self.barrier.wait()
        one, other = self.given.values()
        tensor.copy_(torch.maximum(one, other) if op == dist.ReduceOp.MAX else one + other)
        self.barrier.wait()


@pytest.mark.parametrize("columns", [(4, 5), (9, 0), (1, 8)])
def test_columns_over_two_ranks(columns, monkeypatch):
    """A rank may hold no column at all: nothing but the padding of the vocabulary."""
    monkeypatch.setattr(dist, "all_reduce", lambda t, op=dist.ReduceOp.SUM, group=None: group.all_reduce(t, op))
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 9, generator=draw) * 4
    targets, upstream = torch.tensor([0, 3, 4, 8, 5, 1]), torch.randn(2, 6, generator=draw)
    exact = logits.double().requires_grad_()
    wanted = reference(exact, targets, 0.7)
    (wanted * upstream).sum().backward()
    group = TwoThreads()

    def on_rank(part, start):
        mine = part.clone().requires_grad_()
        found = logprobs_and_entropy(mine, targets, 0.7, vocab_start=start, group=group, chunk_elements=8)
        (found * upstream).sum().backward()
        return found, mine.grad

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(on_rank, logits.split(columns, dim=1), (0, columns[0])))
    for found, _ in ranks:
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks], 1).double(), exact.grad, atol=1e-5, rtol=0)


def test_large_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e4, 3e4, 3e4]], requires_grad=True)
    found = logprobs_and_entropy(logits, torch.tensor([1, 2]), 1.0)
    assert found[0].tolist() == pytest.approx([-2e4, -1.0986123])
    assert found[1].tolist() == pytest.approx([0.0, 1.0986123], abs=1e-6)
    found.sum().backward()
    assert logits.grad.isfinite().all()


def test_half_precision_logits_are_treated_in_float32():
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(9)
    found = logprobs_and_entropy(logits, targets, 1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), reference(logits, targets, 1.0), atol=2e-6, rtol=0)


def test_no_float32_copy_of_all_logits():
    """A step over 8 chunks may hold a few chunks at a time, never all."""
    tokens, vocab = 2048, 1000
    logits = torch.zeros(tokens, vocab, dtype=torch.bfloat16, requires_grad=True)
    chunk = tokens // 8 * vocab
    with torch.profiler.profile(profile_memory=True) as profile:
        logprobs_and_entropy(logits, torch.zeros(tokens, dtype=torch.int64), 1.0, chunk_elements=chunk).sum().backward()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    gradient = tokens * vocab * 2
    assert 0 < peak < gradient + 6 * chunk * 4
