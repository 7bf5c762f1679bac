"""Ctrl-C for a job that runs in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console

from grpo_recipes.launch.job_script import job_pid
from grpo_recipes.runs.folder import RunFolder, process_alive


class StopForwarder:
    """Passes the first Ctrl-C or SIGTERM on to the job, which then saves a checkpoint; the second kills the job.

    The handlers only count: `act`, called over and over by whoever waits for the job, does the work.
    """

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self._folder, self._console = folder, console
        self._signal = signal.SIGINT
        self._received = self._done = 0
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self._received > 0

    def __enter__(self) -> StopForwarder:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        self._received += 1

    def act(self) -> None:
        """Send what is due, once there is a job to send it to."""
        pid = job_pid(self._folder)
        if self._done >= min(self._received, 2) or pid is None or process_alive(self._folder) is not True:
            return
        if self._received >= 2:
            self._console.print("killing the job")
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(os.getpgid(pid), signal.SIGKILL)
            self._done = 2
        else:
            self._console.print("stopping: the job saves a checkpoint first (once more to kill it)")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self._signal)
            self._done = 1
