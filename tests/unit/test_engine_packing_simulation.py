"""Packing on the response lengths of published recipes, drawn anew. `pytest -s` prints the table of docs/packing.md."""

import math
import random
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import pytest

from grpo_recipes.engine.packing import Packed, cut_evenly, packing_stats, share
from grpo_recipes.policy.alignment import Alignment, alignment
from grpo_recipes.recipe.model_flops import model_shape, sequence_cost

QWEN_1_5B = {  # DeepSeek-R1-Distill-Qwen-1.5B
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
SEEDS = range(5)
SPREADS = (0.5, 0.8, 1.1)  # standard deviation of the logarithm: no spread is published
PROMPT = 100  # tokens, mean


@dataclass(frozen=True)
class Case:
    """What a published recipe trains with. `mean`: response tokens."""

    name: str
    model: dict[str, int]
    sequences: int  # per optimizer step
    ranks: int  # data parallel
    tokens: int  # capacity, and the longest sequence
    mean: int
    align: Alignment
    pipeline: bool = False


CASES = [
    Case("deepscaler 8K, first steps", QWEN_1_5B, 64, 8, 8192, 5500, alignment(1, 1, False)),
    Case("deepscaler 8K, last steps", QWEN_1_5B, 64, 8, 8192, 3500, alignment(1, 1, False)),
    Case("deepscaler 16K, DP8", QWEN_1_5B, 64, 8, 16384, 5500, alignment(1, 1, False)),
    Case("deepscaler 16K, TP2 DP4", QWEN_1_5B, 64, 4, 16384, 5500, alignment(2, 1, False)),
    Case("deepscaler 24K, TP4 SP DP2", QWEN_1_5B, 64, 2, 24576, 9000, alignment(4, 1, True)),
    Case("deepscaler 24K, TP2 DP4", QWEN_1_5B, 64, 4, 24576, 9000, alignment(2, 1, False)),
    Case("llama31_8b, DP8", LLAMA_8B, 512, 8, 4096, 795, alignment(1, 1, False)),
    Case("llama31_8b, PP2 DP4", LLAMA_8B, 512, 4, 4096, 795, alignment(1, 1, False), pipeline=True),
    Case("llama31_8b, batch of 2048, PP2 DP8", LLAMA_8B, 2048, 8, 4096, 1019, alignment(1, 1, False), pipeline=True),
    Case("llama31_8b, TP2 CP2 SP DP2", LLAMA_8B, 512, 2, 4096, 795, alignment(2, 2, True)),
]


def lognormal_location(mean: float, spread: float, top: float) -> float:
    """Such that the mean of min(X, top) is `mean`, for a log-normal X: truncated responses count in published means."""
    normal = NormalDist()

    def clipped(location: float) -> float:
        z = (math.log(top) - location) / spread
        return math.exp(location + spread**2 / 2) * normal.cdf(z - spread) + top * (1 - normal.cdf(z))

    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if clipped(middle) < mean else (low, middle)
    return low


def draw_lengths(case: Case, spread: float, seed: int) -> list[int]:
    rng = random.Random(seed)
    prompts = [max(10, round(rng.gauss(PROMPT, PROMPT / 3))) for _ in range(case.sequences)]
    location = lognormal_location(case.mean, spread, case.tokens - PROMPT)
    return [min(case.tokens, p + max(1, int(rng.lognormvariate(location, spread)))) for p in prompts]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bins_balance_and_padding_on_published_lengths(case):
    """At most one microbatch above the bound, costliest rank at most 3 % above the mean, padding at most 2 %."""
    strategy = Packed(case.tokens, case.align, partial(sequence_cost, shape=model_shape(case.model)), case.pipeline)
    rows = []
    for spread in SPREADS:
        for seed in SEEDS:
            lengths = draw_lengths(case, spread, seed)
            shares = share(lengths, case.ranks, strategy)
            per_rank = [[lengths[i] for i in members] for members in shares]
            cuts = cut_evenly(per_rank, strategy)
            bins = [[[n[i] for i in b] for b in c] for n, c in zip(per_rank, cuts, strict=True)]
            stats = packing_stats([bins], strategy, empty=2)
            computed = sum(case.align.padded(n) for n in lengths)
            bound = -(-computed // (case.tokens * case.ranks))
            rows.append((sum(lengths) / len(lengths), stats, bound))
            assert stats.microbatches <= bound + 1
            assert stats.rank_imbalance <= 0.03
            assert stats.padding_fraction <= 0.02
            assert max(case.align.computed(b) for passes in bins for b in passes) <= case.tokens
    above = sum(stats.microbatches > bound for _, stats, bound in rows)
    print(
        f"\n| {case.name} | {case.sequences} | {sum(mean for mean, *_ in rows) / len(rows):,.0f} "
        f"| {sum(bound for *_, bound in rows) / len(rows):.1f} | {above} of {len(rows)} "
        f"| {max(stats.rank_imbalance for _, stats, _ in rows):.2%} "
        f"| {max(stats.padding_fraction for _, stats, _ in rows):.2%} |"
    )
