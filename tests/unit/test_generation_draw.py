"""Random numbers, seeds and the choice of a token."""

import math

import pytest
import torch

from grpo_recipes.generation.megatron.draw import draw, uniform
from grpo_recipes.generation.seeds import sample_seed


def splitmix64(state: int) -> int:
    """The finaliser in plain integers, as published."""
    z = state % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_uniform_equals_the_published_generator():
    seeds = [0, 1, 2**63 - 1, 123456789012345678]
    for position in (0, 1, 7, 100_000):
        drawn = uniform(torch.tensor(seeds), torch.full((4,), position))
        expected = [
            (splitmix64(splitmix64(seed) + (position + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53 for seed in seeds
        ]
        assert drawn.dtype == torch.float64
        assert drawn.tolist() == expected


def kolmogorov_smirnov(sample: torch.Tensor) -> float:
    """sqrt(n) D against the uniform distribution; above 1.95 has probability 0.001."""
    n, ordered = len(sample), sample.sort().values
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return math.sqrt(n) * max((steps[1:] - ordered).max().item(), (ordered - steps[:-1]).max().item())


@pytest.mark.parametrize("along", ["positions", "adjacent seeds"])
def test_uniform_is_uniform(along):
    n = 100_000
    counter, constant = torch.arange(n), torch.full((n,), 42)
    sample = uniform(constant, counter) if along == "positions" else uniform(counter, constant)
    assert sample.min() >= 0
    assert sample.max() < 1
    assert abs(sample.mean().item() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs(sample.var().item() - 1 / 12) < 0.001
    assert kolmogorov_smirnov(sample) < 1.95
    assert abs(torch.corrcoef(torch.stack([sample[:-1], sample[1:]]))[0, 1].item()) < 0.015


def test_streams_of_adjacent_seeds_share_nothing():
    seeds, positions = torch.meshgrid(torch.arange(1000), torch.arange(100), indexing="ij")
    numbers = uniform(seeds.flatten(), positions.flatten())
    assert len(numbers.unique()) == 100_000


def test_sample_seed_is_stable_and_distinct():
    """Covers: every replica samples the same completions, or the run's seed never reaches the sampler."""
    assert sample_seed(42, 0, 0, 0) == 781278201948745507
    assert sample_seed(42, 3, 63, 15) == 549127933073972802
    seeds = [sample_seed(r, s, p, i) for r in range(3) for s in range(10) for p in range(64) for i in range(16)]
    assert len(set(seeds)) == 3 * 10 * 64 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_draw_follows_the_distribution(temperature):
    """Chi-square of 200,000 draws against probabilities in float64; 7 degrees of freedom, 24.3 is the 0.1 % point."""
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0, -2.0, 1.0, 0.25])
    n = 200_000
    u = uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64))
    tokens, logprobs = draw(logits.expand(n, -1), torch.full((n,), temperature), u)
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    expected = torch.tensor([w / sum(weights) for w in weights], dtype=torch.float64)
    counts = torch.bincount(tokens, minlength=8).double()
    assert ((counts - n * expected) ** 2 / (n * expected)).sum().item() < 24.3
    assert logprobs.dtype == torch.float32
    assert (logprobs.double() - expected.log()[tokens]).abs().max().item() < 1e-6


def test_draw_inverts_the_cumulative_distribution():
    """Probabilities 0, 1/4, 0, 1/2, 1/4, 0: the boundaries belong to the token above, and what is impossible never
    comes, not even at the ends."""
    logits = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).log()
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = draw(logits.expand(6, -1), torch.ones(6), u)
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4]
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.25, 0.5, 0.5, 0.25, 0.25])


def test_temperature_zero_is_greedy_and_rows_keep_their_own():
    logits = torch.tensor([[0.0, 1.0, 0.5]]).expand(3, -1)
    tokens, logprobs = draw(logits, torch.tensor([0.0, 0.5, 2.0]), torch.tensor([0.01, 0.01, 0.01]).double())
    assert tokens.tolist() == [1, 0, 0]
    z = [sum(math.exp(x / t) for x in (0.0, 1.0, 0.5)) for t in (1.0, 0.5, 2.0)]
    assert logprobs.tolist() == pytest.approx([1 - math.log(z[0]), -math.log(z[1]), -math.log(z[2])], abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad):
    logits = torch.tensor([[0.0, 1.0], [0.0, bad]])
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(logits, torch.ones(2), torch.full((2,), 0.5).double())
