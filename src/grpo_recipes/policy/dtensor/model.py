"""A model of transformers, sharded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from grpo_recipes.policy.dtensor.attention import NAME
from grpo_recipes.policy.dtensor.mesh import Mesh
from grpo_recipes.policy.dtensor.plan import parallelize

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from grpo_recipes.recipe.schema import PolicyConfig


def empty_model(hf: PretrainedConfig, dtype: torch.dtype, **more: str) -> PreTrainedModel:
    """Without memory for its parameters; never in training mode, whose only effect is dropout."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf, dtype=dtype, attn_implementation=NAME, **more).eval()


def materialize(model: PreTrainedModel, parameters: torch.device, buffers: torch.device) -> None:
    """Memory for the parameters, still without values, and rotary frequencies."""
    model.to_empty(device=parameters)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(buffers)


def build_model(hf: PretrainedConfig, policy: PolicyConfig, mesh: Mesh) -> PreTrainedModel:
    """Parameters are float32 DTensors without values; layers compute in policy.precision.

    Gradients are float32 and summed over the ranks, never averaged: losses arrive as shares of the whole.
    """
    cfg = policy.dtensor_cfg
    model = empty_model(hf, torch.float32)
    if mesh.tensor is not None:
        parallelize(model, mesh.tensor, sequence_parallel=cfg.sequence_parallel)
    bfloat16 = policy.precision == "bfloat16"
    shard = partial(
        fully_shard,
        mesh=mesh.shard,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bfloat16 else None, reduce_dtype=torch.float32 if bfloat16 else None
        ),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if cfg.cpu_offload else OffloadPolicy(),
    )
    for layer in model.model.layers:
        # Inside FSDP2's hooks, so that weights are gathered once for a recomputation and its backward pass.
        if cfg.torch_compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if cfg.activation_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        shard(layer)
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    materialize(model, torch.device("cpu") if cfg.cpu_offload else mesh.device, mesh.device)
    return model
