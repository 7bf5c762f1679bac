"""Small files written so that a reader never sees half of one, and values that survive the trip through JSON."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_recipes.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` in one rename. No fsync: a power cut may lose the write, a killed process cannot."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_json_object(path: Path, *, mend: str) -> dict[str, Any]:
    """Raises UserError if the file is missing or does not hold a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), mend=mend) from None
    except (ValueError, OSError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path), mend=mend) from error
    if not isinstance(value, dict):
        raise UserError(f"holds a JSON {type(value).__name__}, not an object", where=str(path), mend=mend)
    return value


def encode_float(value: float) -> float | str:
    """A float as JSON can carry it: finite ones by their shortest exact decimal, others by name (JSON has no NaN)."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def decode_float(value: float | str) -> float:
    return float(value)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_sha256(folder: Path) -> dict[str, str]:
    """sha256 of every file below the folder by its relative path; hidden files and caches left out."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    relative = ((path, path.relative_to(folder)) for path in files)
    return {
        name.as_posix(): file_sha256(path)
        for path, name in relative
        if not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
    }


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def rows_sha256(rows: Iterable[Any]) -> str:
    """Of any JSON-able rows in their order: one canonical line each. Memory stays flat for large datasets."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":"), default=str).encode() + b"\n")
    return digest.hexdigest()
