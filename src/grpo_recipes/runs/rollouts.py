"""rollouts/step_000040.jsonl: some rollouts of a step, one a line, for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.runs.files import decode_float, encode_float, write_atomically
from grpo_recipes.runs.folder import RunFolder

OPTIONAL = ("reward", "advantage", "mult_prob_error")  # numbers that may be absent


@dataclass(frozen=True)
class Rollout:
    """One response. Per-token fields speak of the R generated tokens, and are empty where they were not kept."""

    prompt: str
    response: str
    reward: float | None  # None: the grader failed
    advantage: float | None
    finish_reason: str
    token_ids: tuple[int, ...] = ()  # [R]
    logprobs: tuple[float, ...] = ()  # [R], natural log, by the sampler
    trainer_logprobs: tuple[float, ...] = ()  # [R], recomputed by the trainer
    tokens: tuple[str, ...] = ()  # [R], the text of each token, so that readers need no tokenizer
    answer: str = ""  # the reference answer
    error: str = ""  # why there is no reward
    group: int | None = None  # rollouts of one prompt share it
    row: int | None = None  # of the training data
    # Mean over R of exp|trainer - sampler logprob|, of the step's worst rollouts only; they have trainer_logprobs, too.
    mult_prob_error: float | None = None


def write_rollouts(folder: RunFolder, step: int, items: Sequence[Rollout]) -> Path:
    """Replaces what an earlier attempt wrote for the same step."""
    folder.rollouts_dir.mkdir(exist_ok=True)
    path = _path(folder, step)
    write_atomically(path, "".join(json.dumps(_encode(item), allow_nan=False) + "\n" for item in items))
    return path


def read_rollouts(folder: RunFolder, step: int) -> list[Rollout]:
    """Raises UserError if there are none of that step or a line is damaged."""
    path = _path(folder, step)
    if not path.is_file():
        kept = ", ".join(map(str, rollout_steps(folder))) or "none"
        raise UserError(f"no rollouts of step {step}", where=str(folder.path), mend=f"steps that were kept: {kept}")
    return [_decode(line, f"{path}, line {i}") for i, line in enumerate(path.read_text().splitlines(), start=1)]


def rollout_steps(folder: RunFolder) -> list[int]:
    """The steps of which rollouts were kept, ascending."""
    return sorted(int(path.stem.removeprefix("step_")) for path in folder.rollouts_dir.glob("step_*.jsonl"))


def _path(folder: RunFolder, step: int) -> Path:
    return folder.rollouts_dir / f"step_{step:06d}.jsonl"


def _encode(item: Rollout) -> dict[str, Any]:
    """Plain data; logprobs also summed up, for readers who only glance."""
    values = asdict(item)
    for name in OPTIONAL:
        values[name] = None if values[name] is None else encode_float(values[name])
    for name in ("logprobs", "trainer_logprobs"):
        values[name] = [encode_float(value) for value in values[name]]
    if item.logprobs:
        mean, low = sum(item.logprobs) / len(item.logprobs), min(item.logprobs)
        values["logprob_stats"] = {"mean": encode_float(mean), "min": encode_float(low)}
    return values


def _decode(line: str, where: str) -> Rollout:
    try:
        values = json.loads(line)
        values.pop("logprob_stats", None)
        for name in OPTIONAL:
            values[name] = None if values.get(name) is None else decode_float(values[name])
        for name in ("logprobs", "trainer_logprobs"):
            values[name] = tuple(decode_float(value) for value in values[name])
        for name in ("token_ids", "tokens"):
            values[name] = tuple(values[name])
        return Rollout(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"not a rollout: {error}", where=where, mend="delete the file or restore it") from error
