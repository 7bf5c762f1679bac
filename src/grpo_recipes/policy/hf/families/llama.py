"""Llama 2 and 3, and what shares their architecture (SmolLM2, DeepSeek's Llama distillations)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.mapping import Rule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OUTER = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab"),
)

LAYER = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",)),
    Rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)


def transformer_config(hf: PretrainedConfig) -> dict[str, Any]:
    for key in ("attention_bias", "mlp_bias"):
        if getattr(hf, key, False):
            raise UserError("biases in a Llama are not supported", where=f"config.json: {key}")
    if hf.hidden_act != "silu":
        raise UserError(f"activation {hf.hidden_act!r} is not supported", where="config.json: hidden_act", mend="silu")
    return {}


FAMILY = Family("llama", transformer_config, OUTER, LAYER)
