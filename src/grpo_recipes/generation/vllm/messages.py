"""What the driver and the engine's process say to each other. Plain values: nothing here needs torch or vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_recipes.generation.contract import FinishReason, Request


@dataclass(frozen=True)
class EngineSetup:
    """arguments: of vLLM's AsyncEngineArgs. environment: variables of the engine's process."""

    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Submit:
    requests: Sequence[Request]


@dataclass(frozen=True)
class Call:
    number: int
    method: str  # of engine_process.Session
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reply:
    """To the call of that number; 0 is the start."""

    number: int
    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Finished:
    """A completion, R tokens."""

    request_id: int
    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Failed:
    """The engine is of no more use; the process ends."""

    error: str
