"""Faults that a layout certificate must catch, planted in the trainer of this process while a block runs.

A certificate that has never failed proves nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from grpo_recipes.errors import UserError
from grpo_recipes.policy.contract import Batch

SWAPPED = "model.layers.0.self_attn.q_proj.weight"


@contextmanager
def swapped_qk_rows() -> Iterator[None]:
    """The first two query rows of the first layer change places while weights are loaded."""
    from grpo_recipes.policy.hf.folder import SafetensorsFolder

    get = SafetensorsFolder.get

    def swapped(self: SafetensorsFolder, name: str, *arguments: Any, **keywords: Any) -> Tensor:
        tensor = get(self, name, *arguments, **keywords)
        return tensor[[1, 0, *range(2, len(tensor))]] if name == SWAPPED else tensor

    with patch.object(SafetensorsFolder, "get", swapped):
        yield


@contextmanager
def missing_reduction() -> Iterator[None]:
    """Gradients of norms, of which sequence parallelism gives each rank a part, are not summed over the ranks."""
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    with patch.object(module, "_allreduce_non_tensor_model_parallel_grads", lambda *_, **__: None):
        yield


@contextmanager
def shifted_boundary() -> Iterator[None]:
    """The first boundary between packed sequences lies one token too late."""
    from grpo_recipes.policy.megatron import trainer

    packed_inputs = trainer.packed_inputs

    def shifted(lengths: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if len(lengths) > 1 and lengths[1] > 1:
            lengths = lengths.clone()
            lengths[0] += 1
            lengths[1] -= 1
        return packed_inputs(lengths, *arguments, **keywords)

    with patch.object(trainer, "packed_inputs", shifted):
        yield


@contextmanager
def halved_denominator() -> Iterator[None]:
    """The last data-parallel rank divides by half the number of tokens: its share of the loss counts twice."""
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    share = MegatronPolicy.share

    def doubled(self: MegatronPolicy, batch: Batch | None) -> Batch:
        shared = share(self, batch)
        last = 1 < self.replica.data_size == self.replica.data_rank + 1
        return replace(shared, weights=2 * shared.weights) if last else shared

    with patch.object(MegatronPolicy, "share", doubled):
        yield


FAULTS = {fault.__name__: fault for fault in (swapped_qk_rows, missing_reduction, shifted_boundary, halved_denominator)}


def check_fault(name: str | None) -> None:
    """Raises UserError for a fault that is not known."""
    if name is not None and name not in FAULTS:
        raise UserError(f"{name!r} is not a fault", where="--plant", mend=f"known: {', '.join(FAULTS)}")


def planted(name: str | None) -> AbstractContextManager[None]:
    """The fault while the block runs; nothing for None."""
    return FAULTS[name]() if name else nullcontext()
