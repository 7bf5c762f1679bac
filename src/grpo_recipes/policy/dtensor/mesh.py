"""Process groups of the trainer: data x context x tensor parallel ranks, tensor parallel ones nearest to one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo_recipes.errors import UserError
from grpo_recipes.policy.context_parallel import ContextShard
from grpo_recipes.policy.contract import Replica
from grpo_recipes.policy.process_group import join

if TYPE_CHECKING:
    from grpo_recipes.recipe.schema import DTensorConfig


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all."""

    device: torch.device
    shard: DeviceMesh  # data x context: the ranks that FSDP2 shards weights over
    tensor: DeviceMesh | None  # None without tensor parallelism
    context: ContextShard | None
    replica: Replica
    replica_group: dist.ProcessGroup | None  # None for a single rank
    data_group: dist.ProcessGroup | None
    control: dist.ProcessGroup  # of all ranks, over gloo: for what lies in host memory

    @property
    def tensor_rank(self) -> int:
        return self.tensor.get_local_rank() if self.tensor else 0

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        return self.tensor.get_group() if self.tensor else None


_meshes: dict[tuple[int, int], Mesh] = {}  # by context and tensor parallel size


def make_mesh(cfg: DTensorConfig) -> Mesh:
    """Collective. Joins the default group where that has not happened; a second mesh of the same sizes is the first.

    Raises UserError where the sizes do not fit the number of processes.
    """
    join()
    world, tensor, context = dist.get_world_size(), cfg.tensor_parallel_size, cfg.context_parallel_size
    if world % (tensor * context):
        raise UserError(
            f"tensor x context parallel size is {tensor * context}, which does not divide {world} processes",
            where="policy.dtensor_cfg",
            mend=f"start a multiple of {tensor * context} processes, or lower one of the two",
        )
    known = _meshes.get((context, tensor))
    if known is None or known.control not in dist.distributed_c10d._world.pg_map:  # ended by another trainer's clean-up
        known = _meshes[context, tensor] = _make(world // (tensor * context), context, tensor)
    return known


def _make(data: int, context: int, tensor: int) -> Mesh:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (data, context, tensor), mesh_dim_names=("data", "context", "tensor"))
    shard = mesh["data", "context"]._flatten("shard")
    replica = mesh["context", "tensor"]._flatten("replica")
    ranks = tuple(replica.mesh.flatten().tolist())
    context_shard = None
    if context > 1:
        context_shard = ContextShard(mesh["context"].get_local_rank(), context, mesh["context"].get_group())
    return Mesh(
        device=torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu"),
        shard=shard,
        tensor=mesh["tensor"] if tensor > 1 else None,
        context=context_shard,
        replica=Replica(mesh["data"].get_local_rank(), data, ranks),
        replica_group=replica.get_group() if len(ranks) > 1 else None,
        data_group=mesh["data"].get_group() if data > 1 else None,
        control=dist.new_group(backend="gloo"),
    )
