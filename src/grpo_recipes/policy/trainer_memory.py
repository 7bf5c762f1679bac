"""The trainer's memory, given back to the device while something else needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from grpo_recipes.policy.contract import Part
from grpo_recipes.policy.host_copy import HostCopy

Tensors = Callable[[], Iterable[Tensor]]


class TrainerMemory:
    """Which parts of a trainer lie on the device. Storages are emptied and filled again under the tensors that share
    them, so that every view that a library and its optimizer keep stays what it was.

    Args:
        weights: every weight of this rank.
        optimizer: every tensor of the optimizer; those that share memory with weights are not its own.
        gradients: buffers that stay; zero before every step, so that no copy of them is kept.
        drop_gradients: lets go of all other gradients.
    """

    def __init__(
        self,
        device: torch.device,
        weights: Tensors,
        optimizer: Tensors,
        gradients: Tensors,
        drop_gradients: Callable[[], None],
    ) -> None:
        self._device, self._weights, self._optimizer = device, weights, optimizer
        self._gradients, self._drop_gradients = gradients, drop_gradients
        self._away: dict[Part, list[tuple[torch.UntypedStorage, int, Tensor | None]]] = {}
        self._host = {part: HostCopy() for part in Part.__args__}  # type: ignore[attr-defined]

    @torch.no_grad()
    def offload(self, part: Part) -> None:
        if part in self._away:
            return
        storages = self._storages(self._weights()) if part == "weights" else self._of_optimizer()
        whole = {str(n): _bytes_of(storage) for n, storage in enumerate(storages)}
        copies = self._host[part].take(whole) if whole else {}
        away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = [
            (storage, storage.nbytes(), copies[str(n)]) for n, storage in enumerate(storages)
        ]
        if part == "optimizer":
            self._drop_gradients()
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

    def _of_optimizer(self) -> Sequence[torch.UntypedStorage]:
        """What float32 recipes step are the weights themselves: those are not the optimizer's."""
        weights = {storage.data_ptr() for storage in self._storages(self._weights())}
        return [storage for storage in self._storages(self._optimizer()) if storage.data_ptr() not in weights]

    def _storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """Each once, and only those on the trainer's device: some of the optimizer may be kept on the host."""
        found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device == self._device}
        return [storage for storage in found.values() if storage.nbytes()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
