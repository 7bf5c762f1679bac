"""Stopping on a signal at a point from which the run can go on unchanged."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A step is abandoned in one of these phases: no weight has changed yet. In any other it is finished first.
BEFORE_TRAINING = frozenset({"generation", "reward", "logprobs", "reference_logprobs", "evaluation"})


class Interrupted(Exception):
    """The run was asked to stop; its state is that of the last completed step."""


class StopRequest:
    """Remembers that a stop signal came."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def check(self, phase: str) -> None:
        """Raises Interrupted if a stop was asked for and `phase` may be abandoned."""
        if self.signal is not None and phase in BEFORE_TRAINING:
            raise Interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    request = StopRequest()
    before = {number: signal.signal(number, request._note) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
