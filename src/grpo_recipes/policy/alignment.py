"""How many tokens a sequence and a microbatch are padded to, so that parallel ranks get equal parts. Never torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from grpo_recipes.recipe.megatron import given_fields
from grpo_recipes.recipe.schema import DTensorConfig

if TYPE_CHECKING:
    from grpo_recipes.recipe.schema import MegatronConfig


class Alignment(NamedTuple):
    """Tokens. A multiple of `pack` is one of `sequence`, so whatever fills up a pack is a well-formed sequence."""

    sequence: int  # every sequence is padded to a multiple of it
    pack: int  # then the whole microbatch is filled up to a multiple of it by one more sequence

    def padded(self, length: int) -> int:
        """Tokens that a sequence of so many takes in a microbatch."""
        return round_up(length, self.sequence)

    def computed(self, lengths: Sequence[int]) -> int:
        """Tokens that a rank group computes for a microbatch of these sequences, padding and filling included."""
        return round_up(sum(self.padded(n) for n in lengths), self.pack)


def alignment(
    tensor_parallel: int, context_parallel: int, sequence_parallel: bool, low_precision: int = 1
) -> Alignment:
    """What the parallel sizes ask for, and `low_precision`: the multiple of tokens that the matrix products of a rank
    need.

    Context parallelism cuts each sequence into 2 x CP equal chunks, of which a rank computes the i-th from the front
    and the i-th from the back (the causal half is then shared out evenly). Sequence parallelism cuts what a context
    rank holds of the whole microbatch into TP equal parts.
    """
    sequence = 2 * context_parallel if context_parallel > 1 else 1
    parts = tensor_parallel if sequence_parallel else 1
    return Alignment(sequence, math.lcm(sequence * parts, low_precision * context_parallel * parts))


def alignment_of(cfg: MegatronConfig | DTensorConfig) -> Alignment:
    """As `alignment`, of a recipe's policy.megatron_cfg or policy.dtensor_cfg. TransformerEngine's 8-bit products take dimensions that are
    multiples of 16; those whose scales stand for blocks of numbers (mxfp8 and the 4-bit formats), of 32."""
    if isinstance(cfg, DTensorConfig):
        return alignment(cfg.tensor_parallel_size, cfg.context_parallel_size, cfg.sequence_parallel)
    extras = given_fields(cfg)
    blocks = extras.get("fp4") or (extras.get("fp8") and extras.get("fp8_recipe") == "mxfp8")
    return alignment(
        cfg.tensor_model_parallel_size,
        cfg.context_parallel_size,
        cfg.sequence_parallel,
        32 if blocks else 16 if extras.get("fp8") else 1,
    )


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
