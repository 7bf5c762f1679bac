"""What the engine asks of a group of workers, wherever they live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self


@dataclass(frozen=True)
class Placement:
    """Where one worker stands."""

    rank: int
    world_size: int
    local_rank: int  # among the workers of its machine
    local_world_size: int
    device: str  # "cpu" or "cuda:<local rank>", the current device when the factory is called


# Makes the worker, on its own process and device. A top-level function, or functools.partial of one: it is pickled.
WorkerFactory = Callable[[Placement], Any]


class WorkerGroup(Protocol):
    """One worker per rank, all of one class. Their methods are called by name and their results come back by rank.

    A method that raises on any rank ends the group: the others are killed, and the exception is raised here within
    seconds with a note that names the rank and holds the traceback of the worker.
    """

    @property
    def world_size(self) -> int: ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """The method with the same arguments on every rank."""

    def scatter(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The method with arguments of its own for each rank."""

    def shutdown(self) -> None:
        """End the workers. May be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class WorkerError(RuntimeError):
    """A worker raised an exception that cannot itself be brought to the driver."""


class WorkerDied(RuntimeError):
    """A worker's process ended without being asked to."""


class WorkerTimeout(TimeoutError):
    """A call took longer than its limit."""
