"""TransformerConfig from a Hugging Face configuration and the recipe's megatron_cfg."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.families import Family
from grpo_recipes.recipe.megatron import dtype_fields

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from grpo_recipes.recipe.schema import PolicyConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
