"""config.json alone decides whether a model can be trained; configurations as published."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.architecture import FAMILIES, check_architecture, head_width, number_of_experts

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2 = {  # a window that is written down and switched off
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
PUBLISHED = {config["model_type"]: config for config in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL)}


def error_of(config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        check_architecture(config)
    assert "\n  -> " in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_configurations_pass(family: str) -> None:
    check_architecture(PUBLISHED[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_makes_of_them_passes(family: str) -> None:
    """It renames num_experts and rope_scaling, and adds what files leave out."""
    from transformers import AutoConfig

    from grpo_recipes.policy.hf.families import family_of

    values = {key: value for key, value in PUBLISHED[family].items() if key != "model_type"}
    hf = AutoConfig.for_model(family, **values)
    assert family_of(hf).model_type == family
    assert number_of_experts(hf.to_dict()) == number_of_experts(PUBLISHED[family])
    assert head_width(hf.to_dict()) == head_width(PUBLISHED[family]) == 128


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (LLAMA, {"model_type": "gpt2"}, "models of type 'gpt2' (LlamaForCausalLM) are not supported"),
        (LLAMA, {"architectures": ["LlamaModel"]}, "models of type 'llama' (LlamaModel) are not supported"),
        (LLAMA, {"hidden_size": None}, "config.json: hidden_size: should be a positive integer, is None"),
        (LLAMA, {"num_hidden_layers": "80"}, "num_hidden_layers: should be a positive integer, is '80'"),
        (LLAMA, {"num_attention_heads": True}, "num_attention_heads: should be a positive integer, is True"),
        (QWEN3, {"head_dim": None}, "head_dim: should be a positive integer, is None"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts: should be a positive integer, is 0"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts: should be a positive integer, is None"),
        (LLAMA, {"num_key_value_heads": 7}, "num_key_value_heads: 64 heads do not divide into 7 groups"),
        (LLAMA, {"hidden_size": 8000, "num_attention_heads": 48}, "48 heads do not divide a hidden size of 8000"),
        (QWEN3, {"head_dim": 127}, "head_dim: RoPE rotates pairs, a head has 127 numbers"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act: activation 'gelu' is not supported\n  -> supported: silu"),
        (LLAMA, {"attention_bias": True}, "attention_bias: biases in a llama are not supported"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias: biases in a llama are not supported"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias: biases in a qwen3_moe are not supported"),
        (QWEN2, {"use_sliding_window": True}, "sliding_window: attention within a window of 4096 tokens"),
        (QWEN2, {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, "4096 tokens"),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 512}, "a window of 512 tokens is not supported"),
        (MIXTRAL, {"sliding_window": 4096}, "a window of 4096 tokens is not supported"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: rope_type 'dynamic'"),
        (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: rope_type 'longrope'"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "heads that rotate only in part"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok: chooses 129 of 128 experts"),
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "teaches its router nothing"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers: layers without experts among layers with experts"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step: layers without experts"),
    ],
)
def test_what_is_not_covered(config: dict[str, Any], changes: dict[str, Any], expected: str) -> None:
    assert expected in error_of(config | changes)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 28}),  # no layer is above
        (QWEN2, {"use_sliding_window": True, "sliding_window": 131072}),  # as wide as the model can read
        (QWEN2, {"use_sliding_window": True, "layer_types": ["full_attention"]}),
        (QWEN3_MOE, {"norm_topk_prob": False, "num_experts_per_tok": 1}),
        (LLAMA, {"num_key_value_heads": None}),
        (LLAMA, {"head_dim": 64}),
    ],
)
def test_what_looks_unusual_and_is_covered(config: dict[str, Any], changes: dict[str, Any]) -> None:
    check_architecture(config | changes)


def test_all_mistakes_at_once() -> None:
    message = error_of(LLAMA | {"hidden_act": "relu", "mlp_bias": True})
    assert message.startswith("2 mistakes in config.json:")
    assert "hidden_act" in message
    assert "mlp_bias" in message
