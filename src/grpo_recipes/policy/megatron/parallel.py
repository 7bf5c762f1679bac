"""Process groups of the trainer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from grpo_recipes.errors import UserError

if TYPE_CHECKING:
    from grpo_recipes.recipe.schema import MegatronConfig


CURRENT_WIDTHS = {
    "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size,
    "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size,
    "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size,
    "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size,
}


def initialize(megatron: MegatronConfig, seed: int) -> None:
    """Join the default group (from torchrun's variables, or alone without any port) and lay Megatron's over it.

    Safe to call again with the same widths. Raises UserError where the widths do not fit the number of processes.
    """
    if megatron.context_parallel_size > 1:
        raise UserError(
            "context parallelism is not in this version",
            where="policy.megatron_cfg.context_parallel_size",
            mend="set 1",
        )
    if not dist.is_initialized():
        _join()
    world = dist.get_world_size()
    model_parallel = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    if world % model_parallel:
        raise UserError(
            f"tensor x pipeline parallel size is {model_parallel}, which does not divide {world} processes",
            where="policy.megatron_cfg",
        )
    widths = {name: getattr(megatron, name) for name in CURRENT_WIDTHS}
    # Megatron drops groups without ending their threads, so they are kept where they fit.
    if not parallel_state.model_parallel_is_initialized() or widths != {n: get() for n, get in CURRENT_WIDTHS.items()}:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**widths)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _join() -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
