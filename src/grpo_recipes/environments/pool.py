"""Graders in processes of their own, each judgement under a deadline.

What judges a response reads text that a model wrote: symbolic mathematics can run for ever inside one C call, and some
verifiers evaluate the text as code. No signal or thread can stop that inside the trainer; killing a process can.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import batched
from typing import Any

START_TIMEOUT_S = 300.0  # importing a grader's libraries from a slow shared disk
START_ATTEMPTS = 3
EXIT_TIMEOUT_S = 1.0  # a process that closed its channel may need a moment to have an exit status
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Verdict:
    """Exactly one of the two is None."""

    score: float | None
    error: str | None


class WorkerGone(Exception):
    """The worker closed its channel, or no longer speaks its language."""


class GraderPool:
    """Judges with `grader`, "module:function", a function of picklable arguments that returns a number.

    A judgement that overruns, raises, or ends its worker gives an error and no score; the others are not affected.
    Workers end with the pool, and by themselves when this process is gone (at the latest when their deadline passes).

    Args:
        timeout_s: seconds for one judgement.
        chunk: judgements sent to a worker at once: more hide the round trip of fast graders, fewer spread slow ones.
    """

    def __init__(self, grader: str, num_workers: int, timeout_s: float, chunk: int = 1) -> None:
        self._chunk = chunk
        self._workers = [_Worker(grader, timeout_s) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")

    def grade(self, tasks: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        """A verdict for the arguments of each task, in order.

        Raises:
            RuntimeError: a worker cannot be started.
        """
        parts = self._threads.map(self._grade_chunk, batched(tasks, self._chunk))
        return [verdict for part in parts for verdict in part]

    def _grade_chunk(self, tasks: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        worker = self._idle.get()
        try:
            return worker.grade(tasks)
        finally:
            self._idle.put(worker)

    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        while self._workers:
            self._workers.pop().stop()


class _Worker:
    """One process. It is started at once and awaited at its first judgement."""

    def __init__(self, grader: str, timeout_s: float) -> None:
        self.grader, self.timeout_s = grader, timeout_s
        self._start()

    def _start(self) -> None:
        self.channel, theirs = socket.socketpair()
        module = "grpo_recipes.environments.pool_worker"
        # Not multiprocessing: its spawn method runs the caller's main module, and so torch, in every worker. The
        # session of its own lets `stop` reach what a grader forks, and keeps Ctrl-C for the trainer.
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, self.grader, str(theirs.fileno()), str(self.timeout_s)],
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

    def stop(self) -> int:
        """Kill the process and whatever it forked, and return its exit code (negative: the signal that ended it)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        return self.process.wait()

    def grade(self, tasks: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        if self.process.poll() is not None:  # it died while nothing was asked of it
            self._restart()
        verdicts: list[Verdict] = []
        while len(verdicts) < len(tasks):
            self._await_ready()
            rest = tasks[len(verdicts) :]
            try:
                self._send(rest)
                for _ in rest:
                    verdicts.append(Verdict(**self._receive(self.timeout_s)))
            except TimeoutError:
                verdicts.append(Verdict(None, f"no verdict within {self.timeout_s:g} s"))
                self._restart()
            except (WorkerGone, ConnectionError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(EXIT_TIMEOUT_S)
                verdicts.append(Verdict(None, f"the grader's process ended ({_describe(self._restart())})"))
        return verdicts

    def _restart(self) -> int:
        code = self.stop()
        self._start()
        return code

    def _await_ready(self) -> None:
        deaths = 0
        while not self._ready:
            try:
                problem = self._receive(START_TIMEOUT_S)["error"]
            except TimeoutError:
                problem = f"not ready after {START_TIMEOUT_S:g} s"
            except (WorkerGone, ConnectionError):  # killed while it started
                problem = _describe(self._restart())
                deaths += 1
                if deaths < START_ATTEMPTS:
                    continue
            if problem is not None:
                raise RuntimeError(f"the grader {self.grader} did not start: {problem}")
            self._ready = True

    def _send(self, tasks: Sequence[tuple[Any, ...]]) -> None:
        self.channel.settimeout(self.timeout_s)
        self.channel.sendall(pickle.dumps(list(tasks)))  # one object: it is read whole before the first is judged

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """One line of JSON: nothing that runs a model's text is unpickled here."""
        self.channel.settimeout(timeout_s)
        while b"\n" not in self._received:
            data = self.channel.recv(65536)
            if not data:
                raise WorkerGone
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError as error:  # the grader wrote into its worker's channel
            raise WorkerGone from error
        return reply


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
