"""Graders in processes of their own, each judgement under a deadline.

What judges a response reads text that a model wrote: symbolic mathematics can run for ever inside one C call, and some
verifiers evaluate the text as code. No signal or thread can stop that inside the trainer; killing a process can.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

START_TIMEOUT_S = 300.0  # importing a grader's libraries from a slow shared disk
MARGIN_S = 60.0  # beyond a judgement's deadline, in which the server must have said so
STOP_TIMEOUT_S = 5.0
MAX_RESTARTS = 3  # of the server within one call
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Verdict:
    """Exactly one of the two is None."""

    score: float | None
    error: str | None


class ServerGone(Exception):
    """The message says how it ended."""


class GraderPool:
    """Judges with `grader`, "module:function", a function of picklable arguments that returns a number.

    A server process (pool_server.py) imports the grader once and forks `num_workers` workers, which judge. A judgement
    that overruns, raises, or ends its worker gives an error and no score, and a fresh worker takes the worker's place;
    the other judgements are not affected. Server and workers end with the pool, and with this process however it ends.

    The server starts at once and is awaited by the first `grade`.

    Args:
        timeout_s: seconds for one judgement.
        chunk: judgements sent to a worker at once: more hide the round trip of fast graders, fewer spread slow ones.
    """

    def __init__(self, grader: str, num_workers: int, timeout_s: float, chunk: int = 1) -> None:
        self._grader, self._timeout_s = grader, timeout_s
        self._arguments = [grader, str(num_workers), str(timeout_s), str(chunk)]
        self._start()

    @property
    def server_pid(self) -> int:
        return self._process.pid

    def grade(self, tasks: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        """A verdict for the arguments of each task, in order.

        Raises:
            RuntimeError: the server cannot be started, or does not stay alive.
        """
        verdicts: dict[int, Verdict] = {}
        restarts = 0
        while len(verdicts) < len(tasks):
            try:
                self._judge({index: task for index, task in enumerate(tasks) if index not in verdicts}, verdicts)
            except ServerGone as error:
                restarts += 1
                if restarts > MAX_RESTARTS:
                    raise RuntimeError(f"the server of {self._grader} does not stay alive: {error}") from error
                self._start()
        return [verdicts[index] for index in range(len(tasks))]

    def close(self) -> None:
        """End the server and its workers. Twice is once."""
        self._channel.close()  # the server's signal to end its workers and itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S if self._ready else 0)
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        # Not multiprocessing: its spawn method runs the caller's main module, and so torch, in the new process. The
        # session of its own keeps Ctrl-C for the trainer.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "grpo_recipes.environments.pool_server", str(theirs.fileno()), *self._arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        theirs.close()
        self._received = b""
        self._ready = False

    def _judge(self, tasks: dict[int, tuple[Any, ...]], verdicts: dict[int, Verdict]) -> None:
        """Fill in verdicts as they come."""
        if not self._ready:
            problem = self._receive(START_TIMEOUT_S)
            if problem is not None:
                raise RuntimeError(f"the grader {self._grader} did not start: {problem}")
            self._ready = True
        try:
            self._channel.settimeout(MARGIN_S)
            self._channel.sendall(pickle.dumps(list(tasks.items())))
        except OSError as error:
            raise self._gone() from error
        for _ in tasks:
            index, score, problem = self._receive(self._timeout_s + MARGIN_S)
            verdicts[index] = Verdict(score, problem)

    def _receive(self, timeout_s: float) -> Any:
        """One line of JSON."""
        self._channel.settimeout(timeout_s)
        try:
            while b"\n" not in self._received:
                data = self._channel.recv(65536)
                if not data:
                    raise self._gone()
                self._received += data
        except OSError as error:
            raise self._gone() from error
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _gone(self) -> ServerGone:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self.close()
        return ServerGone(describe_exit(self._process.returncode))


def describe_exit(code: int) -> str:
    """An exit code as subprocess counts it: negative for a signal."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
