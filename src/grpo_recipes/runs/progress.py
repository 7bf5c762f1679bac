"""What a run is doing now: one small file, replaced many times a step, that a progress bar reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Literal

from grpo_recipes.runs.files import decode_float, encode_float, read_json_object, write_atomically
from grpo_recipes.runs.folder import RunFolder

Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True)
class Progress:
    attempt: int
    step: int  # optimizer batches finished
    max_steps: int
    phase: str  # "generation", "policy_training" …, as in the timing of metrics.jsonl
    reward: float | None  # mean of the last step
    accuracy: float | None  # of the last evaluation, 0 to 1
    tokens_per_second: float | None  # generated and trained tokens over the seconds of the last step
    started_at: float  # seconds since the epoch, of this attempt
    updated_at: float
    status: Status
    message: str = ""  # why it failed, or how to resume


def write_progress(folder: RunFolder, progress: Progress) -> None:
    values = {k: encode_float(v) if isinstance(v, float) else v for k, v in asdict(progress).items()}
    write_atomically(folder.progress_path, json.dumps(values) + "\n")


def read_progress(folder: RunFolder) -> Progress | None:
    """None before the run has said anything."""
    if not folder.progress_path.exists():
        return None
    values = read_json_object(folder.progress_path, mend="the run rewrites it at its next step")
    known = {field.name for field in fields(Progress)}
    values = {key: value for key, value in values.items() if key in known}
    for name in ("reward", "accuracy", "tokens_per_second"):
        values[name] = None if values.get(name) is None else decode_float(values[name])
    return Progress(**values)
