"""Which architectures the trainer covers, told from config.json alone: without torch, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_recipes.recipe.problems import Problem, raise_problems

# model_type -> architecture; a family's table of weights is policy/hf/families/<model_type>.py
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
# RoPE scalings whose frequencies do not depend on the length of the text at hand.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_FURTHER_SIZES = {
    "llama": (),  # num_key_value_heads: as many as heads, as in Llama 1
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
    "qwen3_moe": ("num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "mixtral": ("num_key_value_heads", "num_local_experts", "num_experts_per_tok"),
}


def check_architecture(config: Mapping[str, Any], where: str = "config.json") -> None:
    """Check the config.json of a model, as published or as transformers writes it back.

    Raises:
        UserError: another family, a size that is missing or does not fit, or a variant that is not covered. All
            mistakes at once, each with the key at fault.
    """
    kind, architectures = str(config.get("model_type")), config.get("architectures") or []
    if kind not in FAMILIES or (architectures and FAMILIES[kind] not in architectures):
        found = ", ".join(map(str, architectures)) or "no architecture"
        supported = ", ".join(f"{kind} ({name})" for kind, name in FAMILIES.items())
        problem = Problem(where, f"models of type {kind!r} ({found}) are not supported", f"supported: {supported}")
        raise_problems([problem], where)
    sizes = list(_missing_sizes(config, kind))
    problems = sizes or [
        *_heads(config),
        *_variants(config, kind),
        *_window(config, kind),
        *_rope(config),
        *_experts(config, kind),
    ]
    raise_problems([Problem(f"{where}: {p.where}", p.message, p.mend) for p in problems], where)


def number_of_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer; 0 in a dense model. transformers 5 writes num_local_experts where others have num_experts."""
    experts: int = config.get("num_local_experts") or config.get("num_experts") or 0
    return experts


def head_width(config: Mapping[str, Any]) -> int:
    width: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width


def _missing_sizes(config: Mapping[str, Any], kind: str) -> Iterator[Problem]:
    for key in (*_SIZES, *_FURTHER_SIZES[kind]):
        value = number_of_experts(config) if key in ("num_experts", "num_local_experts") else config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            yield Problem(key, f"should be a positive integer, is {config.get(key)!r}", "correct it")


def _heads(config: Mapping[str, Any]) -> Iterator[Problem]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        yield Problem(
            "num_key_value_heads", f"{heads} heads do not divide into {groups} groups", "give a divisor of the heads"
        )
    if not config.get("head_dim") and hidden % heads:
        yield Problem("head_dim", f"{heads} heads do not divide a hidden size of {hidden}", "set head_dim")
    elif head_width(config) % 2:
        yield Problem("head_dim", f"RoPE rotates pairs, a head has {head_width(config)} numbers", "give an even number")


def _variants(config: Mapping[str, Any], kind: str) -> Iterator[Problem]:
    if config.get("hidden_act", "silu") != "silu":
        yield Problem("hidden_act", f"activation {config['hidden_act']!r} is not supported", "supported: silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and kind != "qwen2":  # whose input projections always have biases
            yield Problem(key, f"biases in a {kind} are not supported", "take a model without")


def _window(config: Mapping[str, Any], kind: str) -> Iterator[Problem]:
    window = config.get("sliding_window")
    if kind == "llama" or window is None or window >= config["max_position_embeddings"]:
        return
    if kind != "mixtral" and not config.get("use_sliding_window", False):
        return
    if kind in ("qwen2", "qwen3"):
        layers = config.get("layer_types")
        full = config.get("max_window_layers", 28) >= config["num_hidden_layers"]
        if ("sliding_attention" not in layers) if layers else full:
            return
    yield Problem(
        "sliding_window",
        f"attention within a window of {window} tokens is not supported",
        "take a model with full attention",
    )


def _rope(config: Mapping[str, Any]) -> Iterator[Problem]:
    """transformers 5 writes rope_parameters where older files have rope_scaling, which call rope_type type."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = config.get(key) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        yield Problem(key, f"rope_type {kind!r} is not supported", f"supported: {', '.join(ROPE_TYPES)}")
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        yield Problem("partial_rotary_factor", "heads that rotate only in part are not supported", "take another model")


def _experts(config: Mapping[str, Any], kind: str) -> Iterator[Problem]:
    experts = number_of_experts(config)
    if "num_experts_per_tok" not in _FURTHER_SIZES[kind]:
        return
    chosen = config["num_experts_per_tok"]
    if chosen > experts:
        yield Problem("num_experts_per_tok", f"chooses {chosen} of {experts} experts", f"set at most {experts}")
    if chosen == 1 and (kind == "mixtral" or config.get("norm_topk_prob")):
        yield Problem(
            "num_experts_per_tok",
            "one expert, whose probability is divided by itself, teaches its router nothing",
            "take a model that chooses several",
        )
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        key = "mlp_only_layers" if config.get("mlp_only_layers") else "decoder_sparse_step"
        yield Problem(key, "layers without experts among layers with experts are not supported", "take another model")
