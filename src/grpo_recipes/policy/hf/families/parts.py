"""What the decoder-only families have in common; names after "decoder.layers.{layer}." and "model.layers.{layer}."."""

from __future__ import annotations

from typing import Any

from grpo_recipes.policy.hf.mapping import Rule

OUTER = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab"),
)

INPUT_NORM = Rule("input_layernorm.weight", ("input_layernorm.weight",))
QKV = Rule(
    "self_attention.linear_qkv.weight",
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv",
)
QKV_BIAS = Rule(
    "self_attention.linear_qkv.bias", ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"), "qkv"
)
QK_NORMS = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
PROJECTION = Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",))
MLP_NORM = Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",))
MLP = (
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)


def mixture_of_experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Router and experts under the published name `block`; a rule with {expert} stands for one rule per expert."""
    expert = f"{block}.experts.{{expert}}"
    return (
        Rule("mlp.router.weight", (f"{block}.gate.weight",)),
        Rule(
            "mlp.experts.local_experts.{expert}.linear_fc1.weight",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            "gate_up",
        ),
        Rule("mlp.experts.local_experts.{expert}.linear_fc2.weight", (f"{expert}.{down}.weight",)),
    )


def routing(experts: int, chosen: int, width: int, *, normalized: bool) -> dict[str, Any]:
    """Fields of TransformerConfig.

    transformers takes a softmax over all experts, then the `chosen` largest, then divides them by their sum where
    `normalized`. Megatron's softmax after the choice equals that division, its softmax before the choice does without.
    Both compute the router's logits in the dtype of the model (moe_router_dtype can ask for more).
    """
    return {
        "num_moe_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalized,
        # Reinforcement learning leaves the routing as pretraining has balanced it, unless the recipe asks for more.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
