"""Qwen3 with experts in every layer (Qwen3-30B-A3B, Qwen3-235B-A22B)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.families.parts import (
    INPUT_NORM,
    MLP_NORM,
    OUTER,
    PROJECTION,
    QK_NORMS,
    QKV,
    mixture_of_experts,
    routing,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def transformer_config(hf: PretrainedConfig) -> dict[str, Any]:
    experts = routing(
        hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, normalized=bool(hf.norm_topk_prob)
    )
    return {"qk_layernorm": True, **experts}


FAMILY = Family(
    "qwen3_moe",
    transformer_config,
    OUTER,
    (
        INPUT_NORM,
        QKV,
        *QK_NORMS,
        PROJECTION,
        MLP_NORM,
        *mixture_of_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
)
