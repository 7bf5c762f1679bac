"""The trainer's memory, given back to the device while something else needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_recipes.policy.contract import Part
from grpo_recipes.policy.host_copy import HostCopy
from grpo_recipes.policy.megatron.optimizer import distributed_optimizers
from grpo_recipes.policy.megatron.optimizer_state import OptimizerState

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer


class TrainerMemory:
    """Which parts of a trainer lie on the device. Storages are emptied and filled again under the tensors that share
    them, so that every view that Megatron and its optimizer keep stays what it was."""

    def __init__(self, model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = next(model[0].parameters()).device
        self._away: dict[Part, list[tuple[torch.UntypedStorage, int, Tensor | None]]] = {}
        self._host = {part: HostCopy() for part in Part.__args__}  # type: ignore[attr-defined]

    @torch.no_grad()
    def offload(self, part: Part) -> None:
        if part in self._away:
            return
        storages = self._storages(self._weights() if part == "weights" else self._optimizer_tensors())
        whole = {str(n): _bytes_of(storage) for n, storage in enumerate(storages)}
        copies = self._host[part].take(whole) if whole else {}
        away = [(storage, storage.nbytes(), copies[str(n)]) for n, storage in enumerate(storages)]
        if part == "optimizer":  # gradients are zero before each step: no copy
            self._optimizer.zero_grad(set_to_none=True)
            away += [(storage, storage.nbytes(), None) for storage in self._storages(self._gradients())]
        del whole
        for storage, _, _ in away:
            storage.resize_(0)
        self._away[part] = away
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def onload(self, *parts: Part) -> None:
        for part in parts:
            for storage, size, copy in self._away.pop(part, ()):
                storage.resize_(size)
                if copy is None:
                    _bytes_of(storage).zero_()
                else:
                    _bytes_of(storage).copy_(copy)

    def _weights(self) -> Iterator[Tensor]:
        for chunk in self._model:
            yield from chunk.parameters()

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self._model:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                yield buffer.grad_data

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """What float32 recipes step are the weights themselves: those are not the optimizer's."""
        weights = {storage.data_ptr() for storage in self._storages(self._weights())}
        for part in distributed_optimizers(self._optimizer):
            for adam in OptimizerState(part).adams:
                mains = [p for group in adam.param_groups for p in group["params"]]
                states = [value for state in adam.state.values() for value in state.values()]
                for tensor in mains + states:
                    if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in weights:
                        yield tensor

    def _storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """Each once, and only those on the trainer's device: Megatron may keep some of the optimizer on the host."""
        found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device == self._device}
        return [storage for storage in found.values() if storage.nbytes()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
