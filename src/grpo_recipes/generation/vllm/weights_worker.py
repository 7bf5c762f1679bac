"""What is added to vLLM's worker class (its worker_extension_cls): new weights from the trainer, and what became of them.

Not a transfer engine of vLLM's own (vllm.distributed.weight_transfer): those take one RPC for each chunk, have no
counterpart on CPUs, and do not show what the loader is handed, which the certificate needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from grpo_recipes.generation.sync.checksum import Checksums

EXTENSION = f"{__name__}.WeightsFromTrainer"


class WeightsFromTrainer:
    """Methods of the worker, called by name through collective_rpc. Results are plain values.

    Both return `tensors`, their number; and if `certify`, `handed`: checksums of what vLLM's loader was handed, by
    Hugging Face name; `wrong`: names of live parameters that are not what was handed; and `unseen`: names of those
    that vLLM keeps in a form of its own, where only logprobs can tell.
    """

    device: torch.device
    model_runner: Any
    reload_weights: Any

    def take_weights(self, address: list[Any], certify: bool) -> dict[str, Any]:
        """By a link (generation.sync.link); `address`: the fields of its Address. Raises RefitError."""
        from grpo_recipes.generation.sync.link import Address, Receiver

        loader = _Loader(self, certify)
        with Receiver(Address(*address), self.device) as receiver:
            receiver.load(loader.load)
        return loader.result()

    def take_folder(self, folder: str, certify: bool) -> dict[str, Any]:
        """From what generation.sync.safetensors_folder wrote."""
        loader = _Loader(self, certify)
        loader.load(_tensors_of(Path(folder)))
        return loader.result()


class _Loader:
    def __init__(self, worker: WeightsFromTrainer, certify: bool) -> None:
        from grpo_recipes.generation.sync.checksum import Checksums
        from grpo_recipes.generation.vllm.live_parameters import LiveParameters

        self.worker, self.tensors = worker, 0
        self.handed: Checksums | None = Checksums() if certify else None
        self.live = LiveParameters(worker.model_runner.get_model()) if certify else None

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.worker.reload_weights(weights_iterator=self._followed(tensors), is_checkpoint_format=True)

    def _followed(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.tensors += 1
            if self.handed is not None and self.live is not None:
                self.handed.add(name, tensor)
                self.live.expect(name, tensor)
            yield name, tensor

    def result(self) -> dict[str, Any]:
        if self.handed is None or self.live is None:
            return {"tensors": self.tensors}
        wrong, unseen = self.live.compare()
        return {"tensors": self.tensors, "handed": self.handed.result(), "wrong": wrong, "unseen": unseen}


def _tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
