"""Process groups of the trainer."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from grpo_recipes.errors import UserError
from grpo_recipes.policy.context_parallel import ContextShard
from grpo_recipes.policy.contract import Replica
from grpo_recipes.policy.process_group import join
from grpo_recipes.recipe.megatron import given_fields

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from grpo_recipes.recipe.schema import MegatronConfig

_widths: dict[str, int | None] = {}  # of the groups that stand
_replica_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}  # by the ranks of a replica


def initialize(megatron: MegatronConfig, seed: int) -> None:
    """Join the default group (from torchrun's variables, or alone without any port) and lay Megatron's over it.

    Collective. Safe to call again, also with other widths. Raises UserError where the widths do not fit the number of
    processes.
    """
    join()
    world = dist.get_world_size()
    widths = {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": given_fields(megatron).get("virtual_pipeline_model_parallel_size"),
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
    }
    model_parallel = (
        megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    )
    if world % model_parallel:
        raise UserError(
            f"tensor x pipeline x context parallel size is {model_parallel}, which does not divide {world} processes",
            where="policy.megatron_cfg",
            mend=f"start a multiple of {model_parallel} processes, or lower one of the three",
        )
    if _widths != widths:
        destroy()
        parallel_state.initialize_model_parallel(**widths, create_gloo_process_groups=False)
        _widths.update(widths)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def destroy() -> None:
    """End every process group but the default one; policies built on them are to be closed before.

    Megatron forgets most of its groups, without ending their threads: those end with the last reference.
    """
    _widths.clear()
    _replica_groups.clear()
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.GroupMember.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def context_shard() -> ContextShard | None:
    """None without context parallelism."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return None
    return ContextShard(parallel_state.get_context_parallel_rank(), size, parallel_state.get_context_parallel_group())


def replica(config: TransformerConfig) -> tuple[Replica, dist.ProcessGroup | None]:
    """Collective. This rank's replica and the group of its ranks (None for a single rank)."""
    mine = parallel_state.get_data_parallel_rank()
    of_rank: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(of_rank, mine)
    multiple = config.microbatch_group_size_per_vp_stage if config.virtual_pipeline_model_parallel_size else 1
    group = None
    for data_rank in range(parallel_state.get_data_parallel_world_size()):
        ranks = tuple(rank for rank, found in enumerate(of_rank) if found == data_rank)
        if ranks not in _replica_groups:  # every rank takes part in making every group
            _replica_groups[ranks] = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if data_rank == mine:
            found_replica = Replica(mine, parallel_state.get_data_parallel_world_size(), ranks, multiple)
            group = _replica_groups[ranks]
    return found_replica, group
