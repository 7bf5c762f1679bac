"""A buffer that processes of one machine see: CUDA IPC on a GPU, a POSIX shared memory file on the CPU."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_recipes.generation.sync.contract import RefitError

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_recipes.generation.sync.link import Peer

SHARED_MEMORY = "/dev/shm"


class SendingBuffer:
    """The trainer's side. Receivers copy what they need before they answer, so one buffer serves every bucket."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises RefitError where shared memory is full."""
        self._path: Path | None = None
        if device.type == "cuda":
            self.buffer: Tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.handle = _cuda_handle(self.buffer)
        else:
            file, path = tempfile.mkstemp(prefix=f"refit_{os.getpid()}_", dir=SHARED_MEMORY)
            self._path = Path(path)
            try:
                os.posix_fallocate(file, 0, nbytes)  # else a full /dev/shm would be a SIGBUS later
            except OSError as error:
                self.opened()
                raise RefitError(
                    f"{SHARED_MEMORY} has no room for {nbytes} bytes ({error.strerror}): give the container more "
                    "(--shm-size), or set policy.generation.refit.transport to broadcast"
                ) from None
            finally:
                os.close(file)
            self.buffer = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
            self.handle = path

    def opened(self) -> None:
        """Every receiver has it: the name can go, so that nothing is left behind whatever happens."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    def send(self, nbytes: int, peers: list[Peer]) -> None:
        """What was written is seen by the others from here on."""
        if self.buffer.is_cuda:
            torch.cuda.synchronize(self.buffer.device)


class ReceivingBuffer:
    def __init__(self, handle: Any, nbytes: int, device: torch.device) -> None:
        self.device = device
        if isinstance(handle, str):
            self.buffer: Tensor = torch.from_file(handle, shared=True, size=nbytes, dtype=torch.uint8)
        else:
            self.buffer = _open_cuda(handle)

    def receive(self, nbytes: int) -> Tensor:
        """A copy of the first bytes: a loader may keep what it is handed until a layer is complete."""
        copy = self.buffer[:nbytes].to(self.device, copy=True)
        if copy.is_cuda:
            torch.cuda.synchronize(copy.device)
        return copy


def _cuda_handle(buffer: Tensor) -> tuple[str, Any]:
    """The GPU by its UUID, as processes may number them differently, and what torch rebuilds the tensor from."""
    from torch.multiprocessing.reductions import reduce_tensor

    return _uuid(buffer.device.index), reduce_tensor(buffer)


def _open_cuda(handle: tuple[str, Any]) -> Tensor:
    uuid, (rebuild, arguments) = handle
    here = [index for index in range(torch.cuda.device_count()) if _uuid(index) == uuid]
    if not here:
        raise RuntimeError(f"this process does not see the trainer's GPU {uuid}: CUDA handles do not reach it")
    arguments = list(arguments)
    arguments[6] = here[0]  # storage_device of torch.multiprocessing.reductions.rebuild_cuda_tensor
    return rebuild(*arguments)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
