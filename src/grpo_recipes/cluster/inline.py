"""One worker in this process, so that a debugger, a profiler and a test see everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from grpo_recipes.cluster.contract import Placement, WorkerFactory
from grpo_recipes.cluster.cores import threads_per_worker


class InlineGroup:
    """A WorkerGroup of one. Exceptions pass through as they are.

    Args:
        factory: makes the worker.
        device: "cpu" or "cuda" (the first GPU).
        threads: of tensor operations; default: every core.
    """

    world_size = 1

    def __init__(self, factory: WorkerFactory, *, device: str = "cpu", threads: int | None = None) -> None:
        self.threads = threads or threads_per_worker(1)
        torch.set_num_threads(self.threads)
        if device == "cuda":
            torch.cuda.set_device(0)
        place = "cuda:0" if device == "cuda" else device
        self._worker = factory(Placement(rank=0, world_size=1, local_rank=0, local_world_size=1, device=place))

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._worker, method)(*args)]

    def scatter(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        [args] = per_rank_args
        return self.call(method, *args)

    def shutdown(self) -> None:
        self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
