"""Tensors in the buckets of a refit plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_recipes.policy.contract import WeightSpec


def in_buckets(plan: Sequence[WeightSpec], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Names and tensors, which come in the plan's order, bucket by bucket."""
    bucket: dict[str, Tensor] = {}
    number = 0
    for spec, (name, tensor) in zip(plan, tensors, strict=True):
        if spec.bucket != number:
            yield bucket
            bucket, number = {}, spec.bucket
        bucket[name] = tensor
    yield bucket
