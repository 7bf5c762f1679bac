"""Safetensors files written one tensor at a time, with their digest on the way: nothing is held twice, and while bytes
are written and hashed other threads of the process go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
CHUNK_BYTES = 16 * 2**20


def write_stream(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write and sync `path`; tensors on a device are brought to the CPU one by one. Returns the file's sha256.

    Raises OSError where the disk is full or refuses.
    """
    # Wide elements first, as safetensors itself orders them, so that every tensor is aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    try:
        with path.open("wb", buffering=0) as file:
            for data in (len(text).to_bytes(8, "little") + text, *(tensors[name] for name in order)):
                for piece in _pieces(data):
                    digest.update(piece)
                    _write_all(file.write, piece)
            os.fsync(file.fileno())
    except OSError as error:  # a failing write does not say where
        raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.hexdigest()


def _pieces(data: bytes | Tensor) -> Iterator[memoryview]:
    if isinstance(data, bytes):
        yield memoryview(data)
        return
    # Copies: a storage that numpy has seen can never be resized again, which offloading does.
    for piece in data.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).split(CHUNK_BYTES):
        yield piece.clone().numpy().data


def _write_all(write: Callable[[memoryview], int | None], rest: memoryview) -> None:
    """A file near the end of the disk takes less than it is given, and says nothing until the next write."""
    while len(rest):
        rest = rest[write(rest) or 0 :]
