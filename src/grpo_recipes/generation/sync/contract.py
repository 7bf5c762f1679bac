"""What the transports of a refit have in common: the error, and how a bucket lies in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from grpo_recipes.policy.contract import WeightSpec

ALIGNMENT = 256  # bytes; of every tensor in a buffer


class RefitError(RuntimeError):
    """New weights did not arrive as they were sent."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int  # byte
    stop: int


@dataclass(frozen=True)
class Layout:
    """One bucket in one buffer; both sides have it before the first byte travels."""

    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    def pack(self, bucket: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Copy a bucket into a buffer of bytes.

        Raises:
            RefitError: names a tensor that is missing, of another shape or dtype, or not of the plan.
        """
        for slot in self.slots:
            if slot.name not in bucket:
                raise RefitError(f"{slot.name} is missing")
            tensor = bucket[slot.name]
            if tuple(tensor.shape) != slot.shape:
                raise RefitError(f"{slot.name} has shape {list(tensor.shape)} and not {list(slot.shape)}")
            if tensor.dtype != slot.dtype:
                raise RefitError(f"{slot.name} is {tensor.dtype} and not {slot.dtype}")
        extra = bucket.keys() - {slot.name for slot in self.slots}
        if extra:
            raise RefitError(f"{min(extra)} is not of the plan")
        for slot in self.slots:
            view_of(slot, buffer).copy_(bucket[slot.name])

    def unpack(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Views into the buffer."""
        for slot in self.slots:
            yield slot.name, view_of(slot, buffer)


def view_of(slot: Slot, buffer: Tensor) -> Tensor:
    return buffer[slot.start : slot.stop].view(slot.dtype).view(slot.shape)


def layouts_of(plan: Sequence[WeightSpec]) -> list[Layout]:
    """One for each bucket of the plan, in order."""
    layouts = []
    for _, specs in groupby(plan, key=lambda spec: spec.bucket):
        slots, end = [], 0
        for spec in specs:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + spec.dtype.itemsize * _count(spec.shape)
            slots.append(Slot(spec.name, tuple(spec.shape), spec.dtype, start, end))
        layouts.append(Layout(tuple(slots)))
    return layouts


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
