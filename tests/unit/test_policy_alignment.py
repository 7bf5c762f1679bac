import pytest

from grpo_recipes.policy.alignment import Alignment, alignment, alignment_of
from grpo_recipes.recipe.schema import MegatronConfig


@pytest.mark.parametrize(
    ("tensor", "context", "sequence_parallel", "expected"),
    [
        (1, 1, False, Alignment(1, 1)),
        (4, 1, False, Alignment(1, 1)),
        (4, 1, True, Alignment(1, 4)),
        (1, 2, False, Alignment(4, 4)),
        (4, 4, False, Alignment(8, 8)),
        (2, 2, True, Alignment(4, 8)),
        (4, 4, True, Alignment(8, 32)),
    ],
)
def test_alignment_follows_from_the_parallel_sizes(tensor, context, sequence_parallel, expected):
    """Covers: alignment to 2 x CP x TP forgotten."""
    assert alignment(tensor, context, sequence_parallel) == expected


def test_tokens_of_a_microbatch_literal():
    found = Alignment(sequence=4, pack=8)
    assert [found.padded(n) for n in (1, 4, 5)] == [4, 4, 8]
    assert found.computed([1, 4, 5]) == 16
    assert found.computed([1, 5]) == 16  # 4 + 8 tokens, and a sequence of 4 to fill up
    assert found.computed([]) == 0


@pytest.mark.parametrize("tensor", [1, 2, 3, 8])
@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_every_rank_gets_an_equal_part(tensor, context):
    align = alignment(tensor, context, sequence_parallel=True)
    tokens = align.computed([1, 7, 13])
    assert tokens % (context * tensor) == 0
    assert (tokens - sum(align.padded(n) for n in (1, 7, 13))) % align.sequence == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (1, 1)),
        ({"fp8": "hybrid"}, (1, 16)),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, (1, 32)),
        ({"fp8": "hybrid", "context_parallel_size": 2}, (4, 32)),
        (
            {
                "fp8": "hybrid",
                "context_parallel_size": 3,
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
            },
            (6, 96),
        ),
    ],
)
def test_low_precision_products_need_multiples_on_every_rank(settings, expected):
    assert alignment_of(MegatronConfig(**settings)) == expected
