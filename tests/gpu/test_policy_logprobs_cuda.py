"""The fused logprob kernels against float64, and what they hold in memory at the size of a large vocabulary."""

import pytest
import torch

from grpo_recipes.policy.logprobs import logprobs_and_entropy
from grpo_recipes.policy.logprobs_triton import row_statistics

pytestmark = pytest.mark.gpu


def reference(logits, targets, temperature):
    logp = (logits.double() / temperature).log_softmax(-1)
    return torch.stack((logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [17, 4096, 32003])
def test_values_and_gradients_against_float64(vocab, dtype):
    draw = torch.Generator("cuda").manual_seed(1)
    logits = (torch.randn(64, vocab, generator=draw, device="cuda") * 6).to(dtype)
    targets = torch.randint(0, vocab, (64,), generator=draw, device="cuda")
    upstream = torch.randn(2, 64, generator=draw, device="cuda")
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = logprobs_and_entropy(mine, targets, 0.7)
    wanted = reference(exact, targets, 0.7)
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=0)
    (found * upstream).sum().backward()
    (wanted * upstream).sum().backward()
    # The gradient is rounded to the dtype of the logits, once.
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(mine.grad.double(), exact.grad, atol=1e-5, rtol=rounding)


def test_statistics_of_some_columns():
    """As a tensor-parallel rank sees them: the target is elsewhere for most rows, and a column slice is not contiguous."""
    logits = torch.randn(50, 300, device="cuda")
    part = logits[:, 100:200]
    local = torch.arange(50, device="cuda") * 6 - 100
    largest, total, weighted, chosen = row_statistics(part, local, 0.5)
    z = part.double() * 2
    torch.testing.assert_close(largest.double(), z.amax(-1))
    z = z - z.amax(-1, keepdim=True)
    torch.testing.assert_close(total.double(), z.exp().sum(-1), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(weighted.double(), (z.exp() * z).sum(-1), atol=1e-5, rtol=1e-6)
    inside = (local >= 0) & (local < 100)
    assert chosen.isnan().tolist() == (~inside).tolist()
    torch.testing.assert_close(
        chosen[inside].double(), z[inside].gather(1, local[inside, None])[:, 0], atol=1e-5, rtol=0
    )


def test_the_gradient_takes_the_place_of_the_logits():
    """16,384 tokens, 128,256 words: 3.9 GiB of bfloat16 logits, and next to nothing besides, forward and backward."""
    tokens, vocab = 16_384, 128_256
    logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = logprobs_and_entropy(logits, targets, 1.0)
    (grad,) = torch.autograd.grad(out.sum(), logits)
    extra = torch.cuda.max_memory_allocated() - before
    print(f"peak beside the logits: {extra / 2**20:.1f} MiB")
    assert grad.data_ptr() == logits.data_ptr()
    assert extra < 4 * 2**20
