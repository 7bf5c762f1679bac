"""The header of a safetensors file, read without torch: 8 bytes of length, then JSON. Tensor data is not read.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.errors import UserError

_MEND = "fetch or write the file again"


@dataclass(frozen=True)
class TensorEntry:
    dtype: str  # F32, BF16 …
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors a file holds.

    Raises:
        UserError: no safetensors file, or shorter or longer than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            raise UserError("is a Git LFS pointer, not the weights", where=str(path), mend="run git lfs pull")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size - 8:
            raise UserError("is damaged or truncated: no safetensors header", where=str(path), mend=_MEND)
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: TensorEntry(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise UserError("is damaged: its safetensors header cannot be read", where=str(path), mend=_MEND) from None
    if size != 8 + length + end:
        raise UserError(
            f"is damaged or truncated: {size} bytes, its header says {8 + length + end}", where=str(path), mend=_MEND
        )
    return tensors
