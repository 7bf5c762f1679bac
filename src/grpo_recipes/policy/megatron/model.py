"""All construction of Megatron's GPTModel, from a Hugging Face configuration and the recipe's megatron_cfg."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from grpo_recipes.policy.attention import Rotary
from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.rope import rotary_of
from grpo_recipes.policy.megatron.config import transformer_config
from grpo_recipes.policy.megatron.core_attention import CoreAttention, TECoreAttention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from grpo_recipes.recipe.schema import PolicyConfig

# GPTModel says at every start that HybridModel will succeed it.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


@dataclass(frozen=True)
class BuiltModel:
    """This rank's part of the model, unwrapped, with what its forward pass needs beside it."""

    chunks: list[GPTModel]  # one, or as many as virtual pipeline stages
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


def build_model(
    hf: PretrainedConfig, family: Family, policy: PolicyConfig, groups: ProcessGroupCollection | None = None
) -> BuiltModel:
    """This rank's part of the model in these groups, by default in Megatron's global ones.

    Raises UserError for fields or values that Megatron refuses.
    """
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    config = transformer_config(hf, family, policy)
    use_te = config.transformer_impl == "transformer_engine"
    virtual = config.virtual_pipeline_model_parallel_size
    stages = range(virtual) if virtual else [None]
    chunks = [_build_chunk(hf, config, policy, groups, use_te, stage) for stage in stages]
    rotary = rotary_of(hf, _device())
    return BuiltModel(chunks, config, rotary, hf.vocab_size, "transformer_engine" if use_te else "local")


def _build_chunk(
    hf: PretrainedConfig,
    config: TransformerConfig,
    policy: PolicyConfig,
    groups: ProcessGroupCollection,
    use_te: bool,
    vp_stage: int | None,
) -> GPTModel:
    tp, vp = config.tensor_model_parallel_size, config.virtual_pipeline_model_parallel_size
    return GPTModel(
        config,
        _block_spec(config, use_te, vp_stage, groups.pp.rank()),
        vocab_size=-(-hf.vocab_size // tp) * tp,
        max_sequence_length=policy.max_total_sequence_length,
        pre_process=is_pp_first_stage(groups.pp) and is_vp_first_stage(vp_stage, vp),
        post_process=is_pp_last_stage(groups.pp) and is_vp_last_stage(vp_stage, vp),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="none",  # CoreAttention rotates
        pg_collection=groups,
        vp_stage=vp_stage,
    ).to(_device())


def _block_spec(
    config: TransformerConfig, use_te: bool, vp_stage: int | None, pp_rank: int
) -> TransformerBlockSubmodules:
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
    layers = [layer] * get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
