"""A copy of device tensors in host memory that is taken again and again into the same place."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, so that each copy can be seen as any dtype


class HostCopy:
    """One block of host memory, as large as the largest set of tensors so far; pinned where CUDA is used.

    A copy is overwritten by the next one: whoever reads it has to be done by then.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], Any] = lambda: None

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of all tensors, complete on return."""
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        on_device = any(tensor.is_cuda for tensor in tensors.values())
        if len(self._block) < end:
            self._allocate(end, pinned=on_device)
        copies = {}
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            copy = self._block[starts[name] : starts[name] + size].view(tensor.dtype).view(tensor.shape)
            copies[name] = copy.copy_(tensor, non_blocking=True)
        if on_device:
            torch.cuda.current_stream().synchronize()
        return copies

    def _allocate(self, size: int, *, pinned: bool) -> None:
        """Whole pages of its own, pinned afterwards: torch's own pinned memory comes in powers of two."""
        self._unpin()
        self._block = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        if pinned:
            address = self._block.data_ptr()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
            self._unpin = weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, address)
            self._unpin.atexit = False
