"""metrics.jsonl: append-only, the truth about a run. One JSON object a line:

{"attempt": 1, "step": 3, "kind": "train", "metrics": {...}, "timing": {...}, "memory": {...}}

`metrics` must repeat exactly when a run is repeated; `timing` (seconds, tokens per second) and `memory` (bytes) need
not, which is why they are apart. A resumed run first writes {"attempt": 2, "resumed_from": 40}: what earlier attempts
did beyond step 40 no longer counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_recipes.errors import UserError
from grpo_recipes.runs.files import decode_float, encode_float
from grpo_recipes.runs.folder import RunFolder

Kind = Literal["train", "val"]


@dataclass(frozen=True)
class MetricsRow:
    attempt: int
    step: int
    kind: Kind
    metrics: dict[str, float]
    timing: dict[str, float] = field(default_factory=dict)  # seconds, or tokens per second where the name says so
    memory: dict[str, float] = field(default_factory=dict)  # bytes


class MetricsLog:
    """The writer of one attempt. Every row is one write to a file opened for appending, so a kill tears at most it."""

    def __init__(self, folder: RunFolder, attempt: int, resumed_from: int | None = None) -> None:
        """resumed_from: the step this attempt goes on from (0: from the start); None for a run's first attempt."""
        self._attempt = attempt
        mend_torn_tail(folder.metrics_path)
        self._file = folder.metrics_path.open("ab", buffering=0)
        if resumed_from is not None:
            self._write({"attempt": attempt, "resumed_from": resumed_from})

    def append(
        self,
        step: int,
        kind: Kind,
        metrics: Mapping[str, float],
        timing: Mapping[str, float] | None = None,
        memory: Mapping[str, float] | None = None,
    ) -> MetricsRow:
        row = MetricsRow(self._attempt, step, kind, dict(metrics), dict(timing or {}), dict(memory or {}))
        groups = {"metrics": row.metrics, "timing": row.timing, "memory": row.memory}
        encoded = {name: {key: encode_float(value) for key, value in group.items()} for name, group in groups.items()}
        self._write({"attempt": row.attempt, "step": step, "kind": kind, **encoded})
        return row

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")


def read_metrics(path: Path) -> list[MetricsRow]:
    """The rows that count, sorted by step, training before evaluation.

    Of each kind and step the last attempt counts. Rows of an attempt beyond the step that a later attempt resumed
    from are dropped, also where that attempt has not come so far yet. An absent file holds no rows.

    Raises:
        UserError: a line other than the last is not a complete row.
    """
    kept: dict[tuple[Kind, int], MetricsRow] = {}
    attempt = 0
    for entry in _entries(path):
        if isinstance(entry, MetricsRow):
            # Without a resume line the first row tells: a step is trained, then evaluated.
            start = (entry.attempt, entry.step - 1 if entry.kind == "train" else entry.step)
        else:
            start = entry
        if start[0] > attempt:
            if attempt:
                kept = {key: row for key, row in kept.items() if row.step <= start[1]}
            attempt = start[0]
        if isinstance(entry, MetricsRow):
            kept[entry.kind, entry.step] = entry
    return sorted(kept.values(), key=lambda row: (row.step, row.kind == "val"))


def last_attempt(path: Path) -> int:
    """The highest attempt in the file, 0 if there is none."""
    return max((e.attempt if isinstance(e, MetricsRow) else e[0] for e in _entries(path)), default=0)


def series(rows: Sequence[MetricsRow], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric."""
    return [(row.step, row.metrics[name]) for row in rows if name in row.metrics]


def mend_torn_tail(path: Path) -> None:
    """Cut off a last line that a killed writer left unfinished, so that the next row starts on a line of its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    if not data or data.endswith(b"\n"):
        return
    whole = data.rfind(b"\n") + 1
    with path.open("r+b") as file:
        if _parse(data[whole:]) is None:
            file.truncate(whole)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _entries(path: Path) -> Iterator[MetricsRow | tuple[int, int]]:
    """Rows, and (attempt, resumed_from) for each resume line, in the file's order."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _parse(line)
        if entry is not None:
            yield entry
        elif number < len(lines):  # the last element is what follows the last newline: torn, or empty
            raise UserError(
                "is not a complete row", where=f"{path}, line {number}", mend="the file was damaged: restore it"
            )


def _parse(line: bytes) -> MetricsRow | tuple[int, int] | None:
    try:
        value = json.loads(line)
        if "resumed_from" in value:
            return int(value["attempt"]), int(value["resumed_from"])
        groups = {
            name: {str(key): decode_float(v) for key, v in value.get(name, {}).items()}
            for name in ("metrics", "timing", "memory")
        }
        if value["kind"] not in ("train", "val"):
            return None
        return MetricsRow(int(value["attempt"]), int(value["step"]), value["kind"], **groups)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
