"""Mixtral: a Llama with experts in every layer, whose published names are those of its first release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.families.parts import (
    INPUT_NORM,
    MLP_NORM,
    OUTER,
    PROJECTION,
    QKV,
    mixture_of_experts,
    routing,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def transformer_config(hf: PretrainedConfig) -> dict[str, Any]:
    return routing(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, normalized=True)


FAMILY = Family(
    "mixtral",
    transformer_config,
    OUTER,
    (
        INPUT_NORM,
        QKV,
        PROJECTION,
        MLP_NORM,
        *mixture_of_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
)
