"""From the config.json of a model to one of the same family and features that a laptop can train in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.architecture import number_of_experts

VOCABULARY = 131  # prime: no tensor-parallel size divides it
ROPE_LENGTH = 256  # positions of the unscaled model: wavelengths lie on both sides of a scaling's borders
_LEFT_OUT = ("quantization_config", "auto_map", "_name_or_path", "transformers_version", "torch_dtype", "dtype")

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
# Configurations with the features of each family, to certify without a model at hand.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 128,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "qwen2": {
        **_COMMON,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 160,
        "attention_bias": False,
        "use_sliding_window": False,
    },
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 160,
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "mixtral": {
        **_COMMON,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}


def shrink(
    config: Mapping[str, Any],
    *,
    layers: int = 4,
    vocab_size: int = VOCABULARY,
    head_dim: int | None = None,
    where: str = "config.json",
) -> dict[str, Any]:
    """A tiny configuration that keeps what makes the family: the ratio of query to key-value heads, whether the heads
    together are as wide as the hidden state, tied embeddings, biases, norms of queries and keys, the kind of RoPE
    scaling with wavelengths on both sides of its borders, and routed experts with the router's settings.

    Args:
        config: a Hugging Face config.json.
        layers: of the result.
        vocab_size: of the result; by default no tensor-parallel size divides it.
        head_dim: of the result; by default 16, or 8 where there are more than eight heads.
        where: named in errors.

    Raises:
        UserError: a size is missing or its ratios make no model.
    """
    hidden, queries = _size(config, "hidden_size", where), _size(config, "num_attention_heads", where)
    groups = int(config.get("num_key_value_heads") or queries)
    if queries % groups:
        raise UserError(
            f"{queries} query heads are not a multiple of {groups} key-value heads",
            where=f"{where}: num_key_value_heads",
        )
    ratio = queries // groups
    tiny_groups = min(groups, 4 if ratio <= 2 else 2)
    heads = tiny_groups * ratio
    width = head_dim or (16 if heads <= 8 else 8)
    as_wide_as_hidden = (config.get("head_dim") or hidden // queries) * queries == hidden
    tiny_hidden = heads * width if as_wide_as_hidden else heads * width * 3 // 4
    tiny = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    tiny |= {
        "num_hidden_layers": layers,
        "hidden_size": tiny_hidden,
        "intermediate_size": tiny_hidden * 3 // 2,
        "num_attention_heads": heads,
        "num_key_value_heads": tiny_groups,
        "head_dim": width,
        "vocab_size": vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    tiny |= _positions(config)
    tiny |= _layer_lists(config, layers)
    tiny |= _experts(config, tiny_hidden)
    return tiny


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"{key} is {value!r}, not a positive number",
            where=where,
            mend="give the config.json of a Hugging Face model",
        )
    return value


def _positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes rope_parameters where older files have rope_theta and rope_scaling."""
    result: dict[str, Any] = {"max_position_embeddings": ROPE_LENGTH}
    for key in ("rope_parameters", "rope_scaling"):
        scaling = config.get(key)
        if not isinstance(scaling, Mapping):
            continue
        result[key] = dict(scaling)
        if "original_max_position_embeddings" in scaling:
            result[key]["original_max_position_embeddings"] = ROPE_LENGTH
        if "factor" in scaling:
            result["max_position_embeddings"] = int(ROPE_LENGTH * float(scaling["factor"]))
    return result


def _layer_lists(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """What config.json says layer by layer, for the first layers."""
    result: dict[str, Any] = {}
    if config.get("layer_types"):
        result["layer_types"] = list(config["layer_types"])[:layers]
    if config.get("max_window_layers") is not None:
        result["max_window_layers"] = min(int(config["max_window_layers"]), layers)
    if config.get("mlp_only_layers"):
        result["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < layers] or [0]
    return result


def _experts(config: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    experts = number_of_experts(config)
    if not experts:
        return {}
    key = "num_experts" if config.get("num_experts") else "num_local_experts"
    result: dict[str, Any] = {
        key: min(experts, 8),
        "num_experts_per_tok": min(int(config.get("num_experts_per_tok") or 1), 2),
    }
    if config.get("moe_intermediate_size"):
        result["moe_intermediate_size"] = hidden // 2 + 8
    return result
