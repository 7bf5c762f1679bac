"""Megatron's configuration objects from a Hugging Face configuration and the recipe's megatron_cfg.

Each is built once, so that Megatron's own checks see every value; nothing sets a field afterwards (the hooks, such as
no_sync_func, are not settings).
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import logging
import re
from collections.abc import Collection, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import torch
from megatron.core.transformer import TransformerConfig

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.families import Family
from grpo_recipes.recipe.megatron import given_fields
from grpo_recipes.recipe.megatron_combinations import needs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from grpo_recipes.recipe.schema import PolicyConfig

logger = logging.getLogger(__name__)

WHERE = "policy.megatron_cfg"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(hf: PretrainedConfig, family: Family, policy: PolicyConfig) -> TransformerConfig:
    """Raises UserError for a combination that Megatron refuses, and for a setting that this machine lacks the hardware
    or TransformerEngine for."""
    _check_hardware(policy)
    dtype = DTYPES[policy.precision]
    megatron, extras = policy.megatron_cfg, given_fields(policy.megatron_cfg)
    values: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **family.transformer_config(hf),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "transformer_impl": _transformer_impl(policy),
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # every weight is loaded or drawn by name, see policy/hf
        # The loss arrives as this microbatch's share of the whole step: Megatron must not divide it again.
        "calculate_per_token_loss": True,
        # Only pipeline stages exchange shapes, and the all-gather dispatcher refuses it.
        "variable_seq_lengths": extras.get("moe_token_dispatcher_type") != "allgather",
        "moe_token_dispatcher_type": "alltoall",
        # These two need CUDA extensions or torch.compile, and fused RoPE and SwiGLU in bf16 have caused a mismatch
        # between trainer and sampler; a recipe may turn them on.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        "sequence_parallel": megatron.sequence_parallel,
    }
    if megatron.activation_checkpointing and extras.get("recompute_granularity") != "selective":
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if extras.get("virtual_pipeline_model_parallel_size"):
        # Of two stages each is the other's next and previous: what is sent both ways in one batch would be received
        # the wrong way round.
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if dtype is torch.float32 and torch.cuda.is_available():
        # Where TransformerEngine is installed every router uses its matrix product, which rounds float32 to 10 bits.
        values |= {"moe_router_dtype": "fp64"}
    if extras.get("moe_expert_capacity_factor") is not None:
        logger.warning("moe_expert_capacity_factor drops tokens: logprobs depend on how batches are cut")
    return build(TransformerConfig, values | extras, WHERE, given={*extras, *megatron.model_fields_set})


def build(kind: type, values: Mapping[str, Any], section: str, given: Collection[str]) -> Any:
    """One of Megatron's configuration dataclasses.

    Args:
        values: by field; enums by member's name and dtypes by torch name, as a recipe writes them.
        section: of the recipe.
        given: the keys that the recipe sets.

    Raises UserError, naming the settings concerned, for values that Megatron refuses.
    """
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    try:
        return kind(**{name: _as_typed(value, types[name]) for name, value in values.items()})
    except (AssertionError, ValueError, RuntimeError) as error:  # Megatron's own checks
        words = set(re.findall(r"\w+", str(error)))
        settings = [name for name in values if name in given]
        concerned = [name for name in settings if name in words] or settings
        raise UserError(
            str(error) or "Megatron-Core refuses this combination",
            where=f"{section}.{concerned[0]}" if len(concerned) == 1 else section,
            mend=f"change {' or '.join(concerned)}" if concerned else None,
        ) from error


def _as_typed(value: Any, annotation: Any) -> Any:
    """A YAML value as Megatron's annotation wants it: an enum's member, a dtype, a tuple."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    origins = {get_origin(option) or option for option in options}
    if isinstance(value, list) and tuple in origins and list not in origins:
        return tuple(value)
    if isinstance(value, str) and str not in origins:
        if torch.dtype in origins:
            return getattr(torch, value)
        for option in options:
            if isinstance(option, type) and issubclass(option, enum.Enum):
                return option[value]
    return value


def _has_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def _transformer_impl(policy: PolicyConfig) -> str:
    chosen = policy.megatron_cfg.transformer_impl
    if chosen != "auto":
        return chosen
    return "transformer_engine" if policy.precision == "bfloat16" and _has_transformer_engine() else "local"


def _check_hardware(policy: PolicyConfig) -> None:
    has_gpu = torch.cuda.is_available()
    has = {"gpu": has_gpu, "te": _has_transformer_engine()}
    for path, value, need in needs(policy.megatron_cfg):
        if not has[need]:
            what = "a GPU" if need == "gpu" or not has_gpu else "TransformerEngine, which is not installed here"
            raise UserError(f"{value!r} needs {what}", where=path, mend="remove it, or use the recipe's container")
