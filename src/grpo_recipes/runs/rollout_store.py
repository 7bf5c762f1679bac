"""rollouts/step_000005.safetensors: every rollout of a step, exactly as it was drawn and judged, for programs to read.

(rollouts/step_000005.jsonl are some of them for people, see runs/rollouts.py.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_recipes.errors import UserError
from grpo_recipes.runs.folder import RunFolder

FINISH_REASONS = ("stop", "length", "abort")  # finish_reason is a place in it


@dataclass(frozen=True)
class StoredRollouts:
    """S samples, those of a group one after the other; P prompt tokens and R drawn tokens of all of them end to end."""

    step: int  # the step that trained on them, counted from 1
    weight_version: int  # at the step's start
    recipe_digest: str
    prompt_ids: NDArray[np.int32]  # [P]
    prompt_lengths: NDArray[np.int32]  # [S]
    response_ids: NDArray[np.int32]  # [R]
    response_lengths: NDArray[np.int32]  # [S]
    logprobs: NDArray[np.float32]  # [R], natural log, the sampler's
    weight_versions: NDArray[np.int32]  # [R], of the weights each token was drawn by
    example: NDArray[np.int32]  # [S], row of the training data
    group: NDArray[np.int64]  # [S], number of its group in the order of the data, counted from 0 over the whole run
    sample: NDArray[np.int32]  # [S], number within its group
    seed: NDArray[np.int64]  # [S]
    reward: NDArray[np.float64]  # [S]; 0 where not valid
    valid: NDArray[np.bool_]  # [S], false where the grader failed
    finish_reason: NDArray[np.uint8]  # [S], place in FINISH_REASONS


ARRAYS: Mapping[str, type[np.generic]] = {
    "prompt_ids": np.int32,
    "prompt_lengths": np.int32,
    "response_ids": np.int32,
    "response_lengths": np.int32,
    "logprobs": np.float32,
    "weight_versions": np.int32,
    "example": np.int32,
    "group": np.int64,
    "sample": np.int32,
    "seed": np.int64,
    "reward": np.float64,
    "valid": np.bool_,
    "finish_reason": np.uint8,
}
PER_SAMPLE = frozenset(ARRAYS) - {"prompt_ids", "response_ids", "logprobs", "weight_versions"}
assert {field.name for field in fields(StoredRollouts)} == {"step", "weight_version", "recipe_digest", *ARRAYS}


def write_stored(folder: RunFolder, step: int, stored: StoredRollouts) -> None:
    """Replaces what an earlier attempt wrote for the same step; a reader never sees half of it."""
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(getattr(stored, name), dtype=kind) for name, kind in ARRAYS.items()}
    metadata = {name: str(getattr(stored, name)) for name in ("step", "weight_version", "recipe_digest")}
    folder.rollouts_dir.mkdir(exist_ok=True)
    path = _path(folder, step)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(save(arrays, metadata))
    os.replace(aside, path)


def read_stored(folder: RunFolder, step: int) -> StoredRollouts:
    """Raises UserError if there are none of that step, or the file is damaged."""
    from safetensors import SafetensorError, safe_open

    path = _path(folder, step)
    if not path.is_file():
        kept = ", ".join(map(str, stored_steps(folder))) or "none"
        raise UserError(
            f"no stored rollouts of step {step}",
            where=str(folder.path),
            mend=f"steps that were stored: {kept} (logger.num_rollout_steps_to_store says how many are)",
        )
    try:
        with safe_open(path, framework="np") as file:
            arrays: dict[str, Any] = {name: file.get_tensor(name) for name in ARRAYS}
            metadata = file.metadata()
        stored = StoredRollouts(
            step=int(metadata["step"]),
            weight_version=int(metadata["weight_version"]),
            recipe_digest=metadata["recipe_digest"],
            **arrays,
        )
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path), mend="restore the file") from error
    problem = _inconsistency(stored)
    if problem:
        raise UserError(f"contradicts itself: {problem}", where=str(path), mend="restore the file")
    return stored


def stored_steps(folder: RunFolder) -> list[int]:
    """The steps whose rollouts are stored, ascending."""
    return sorted(int(path.stem.removeprefix("step_")) for path in folder.rollouts_dir.glob("step_*.safetensors"))


def keep_last(folder: RunFolder, most: int) -> None:
    """Delete the stored rollouts of all but the last `most` steps."""
    for step in stored_steps(folder)[:-most] if most else stored_steps(folder):
        _path(folder, step).unlink()


def _inconsistency(stored: StoredRollouts) -> str | None:
    for name, kind in ARRAYS.items():
        array = getattr(stored, name)
        if array.dtype != kind or array.ndim != 1:
            return f"{name} is {array.dtype} with {array.ndim} dimensions"
    samples = len(stored.prompt_lengths)
    sizes = {
        "prompt_ids": int(stored.prompt_lengths.sum()),
        **dict.fromkeys(("response_ids", "logprobs", "weight_versions"), int(stored.response_lengths.sum())),
        **dict.fromkeys(PER_SAMPLE, samples),
    }
    for name, size in sizes.items():
        if len(getattr(stored, name)) != size:
            return f"{name} has {len(getattr(stored, name))} entries, expected {size}"
    return None


def _path(folder: RunFolder, step: int) -> Path:
    return folder.rollouts_dir / f"step_{step:06d}.safetensors"
