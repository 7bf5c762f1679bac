"""How many workers a recipe asks for, and on which devices of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_recipes.cluster.contract import WorkerFactory, WorkerGroup
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import ClusterConfig


@dataclass(frozen=True)
class World:
    size: int  # processes that train
    device: Literal["cpu", "cuda"]


def find_world(cluster: ClusterConfig) -> World:
    """`world_of` for this machine. Starts nothing on a GPU."""
    import torch

    return world_of(cluster, torch.cuda.device_count())


def world_of(cluster: ClusterConfig, gpus: int) -> World:
    """The processes asked for, on a machine with so many GPUs.

    Raises:
        UserError: it has fewer GPUs than the recipe asks for.
    """
    if cluster.gpus_per_node > gpus:
        raise UserError(
            f"asks for {cluster.gpus_per_node} GPUs, and this machine has {gpus or 'none'}",
            where="cluster.gpus_per_node",
            mend=f"run it on a machine with as many, or set it to {gpus}"
            + ("" if gpus else " and cluster.cpu_processes to the number of processes"),
        )
    if cluster.gpus_per_node:
        return World(cluster.gpus_per_node, "cuda")
    size = cluster.cpu_processes or 1
    return World(size, "cuda" if size == 1 and gpus else "cpu")


def start_workers(factory: WorkerFactory, world: World, threads: int | None) -> WorkerGroup:
    """One worker in this process, or several each in its own. In the second case this process never touches a GPU.

    Args:
        threads: of each worker's tensor operations; default: its share of the cores.

    Raises:
        Whatever the factory raises.
    """
    if world.size == 1:
        from grpo_recipes.cluster.inline import InlineGroup

        return InlineGroup(factory, device=world.device, threads=threads)
    from grpo_recipes.cluster.process import ProcessGroup

    return ProcessGroup(factory, world.size, device=world.device, threads=threads)
