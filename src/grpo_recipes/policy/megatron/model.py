"""All construction of Megatron's GPTModel, from a Hugging Face configuration and the recipe's megatron_cfg."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from grpo_recipes.errors import UserError
from grpo_recipes.policy.attention import Rotary
from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.rope import rotary_of
from grpo_recipes.policy.megatron.core_attention import CoreAttention, TECoreAttention
from grpo_recipes.recipe.megatron import dtype_fields

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from grpo_recipes.recipe.schema import PolicyConfig

# GPTModel says at every start that HybridModel will succeed it.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class BuiltModel:
    """One pipeline stage of the model, unwrapped, with what its forward pass needs beside it."""

    module: GPTModel
    config: TransformerConfig
    rotary: Rotary
    vocab_size: int  # without padding
    spec: str  # which layer spec was chosen, for the manifest


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm as Megatron's layers build it. Megatron's own wrapper of it refuses sequence parallelism; the
    flag on the weight makes Megatron sum its gradient over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device())
        self.weight.sequence_parallel = config.sequence_parallel


def build_model(hf: PretrainedConfig, family: Family, policy: PolicyConfig) -> BuiltModel:
    """Needs initialised model-parallel groups. Raises UserError for fields or values that Megatron refuses."""
    config = transformer_config(hf, family, policy)
    use_te = torch.cuda.is_available() and policy.precision == "bfloat16" and _installed("transformer_engine")
    tp = config.tensor_model_parallel_size
    module = GPTModel(
        config,
        _block_spec(config, use_te),
        vocab_size=-(-hf.vocab_size // tp) * tp,
        max_sequence_length=policy.max_total_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="none",  # CoreAttention rotates
    ).to(_device())
    rotary = rotary_of(hf, _device())
    return BuiltModel(module, config, rotary, hf.vocab_size, "transformer_engine" if use_te else "local")


def transformer_config(hf: PretrainedConfig, family: Family, policy: PolicyConfig) -> TransformerConfig:
    dtype = DTYPES[policy.precision]
    megatron = policy.megatron_cfg
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
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # every weight is loaded or drawn by name, see policy/hf
        # The loss arrives as this microbatch's share of the whole step: Megatron must not divide it again.
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable lengths
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
    if megatron.activation_checkpointing:
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    dtypes = dtype_fields("TransformerConfig")
    extras = megatron.model_extra or {}
    values |= {k: getattr(torch, v) if k in dtypes and isinstance(v, str) else v for k, v in extras.items()}
    try:
        return TransformerConfig(**values)
    except (AssertionError, ValueError) as error:  # Megatron's own checks of combinations
        raise UserError(str(error) or "Megatron-Core refuses this combination", where="policy.megatron_cfg") from error


def _block_spec(config: TransformerConfig, use_te: bool) -> TransformerBlockSubmodules:
    common = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
    }
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(**common), TENorm
        layer.submodules.self_attention.submodules.core_attention = TECoreAttention
    else:
        layer, norm = get_gpt_layer_local_spec(**common, normalization="RMSNorm"), RMSNorm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
