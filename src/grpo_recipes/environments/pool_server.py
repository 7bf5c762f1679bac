"""The server of a GraderPool: imports the grader once and forks workers that judge. It never judges itself.

A worker may hang, die, fork or write nonsense; the server gives its current judgement up, ends it with all it started,
and forks another in a few milliseconds. Tasks come in pickled; verdicts go out as lines of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import batched
from typing import Any

from grpo_recipes.environments.pool import describe_exit

MEMORY_LIMIT = 4 * 2**30  # bytes of address space: a runaway expression fails here before it takes the machine down
ERROR_LENGTH = 300  # characters
EXIT_GRACE_S = 1.0  # a process that closed its channel may need a moment to have an exit status
PR_SET_PDEATHSIG = 1  # linux/prctl.h

Grade = Callable[..., float]
Task = tuple[int, tuple[Any, ...]]  # the pool's number of the task, the grader's arguments
Reply = tuple[float | None, str | None]  # score or error


class WorkerGone(Exception):
    """It closed its channel, or no longer speaks its language."""


class Worker:
    """A forked process that judges the tasks it is given, in order."""

    def __init__(self, grade: Grade, others: Sequence[socket.socket]) -> None:
        """`others`: the channels that the new process must not keep open, or their ends would go unnoticed."""
        self.channel, theirs = socket.socketpair()
        server = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                for channel in (self.channel, *others):
                    os.close(channel.fileno())
                run_worker(grade, theirs, server)
            os._exit(1)
        theirs.close()
        self.assigned: deque[Task] = deque()
        self.deadline = math.inf
        self._received = b""

    def fileno(self) -> int:
        return self.channel.fileno()

    def assign(self, tasks: Sequence[Task], timeout_s: float) -> None:
        self.assigned = deque(tasks)
        self.deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):  # dead, which the next read tells
            self.channel.sendall(pickle.dumps([arguments for _, arguments in tasks]))

    def read(self, timeout_s: float) -> list[tuple[int, Reply]]:
        """Replies that have arrived. Blocks if nothing has."""
        with contextlib.suppress(ConnectionError):
            data = self.channel.recv(65536)
            *lines, self._received = (self._received + data).split(b"\n")
            replies = [parse_reply(line) for line in lines]
            if data and len(replies) <= len(self.assigned):
                if replies:
                    self.deadline = time.monotonic() + timeout_s
                return [(self.assigned.popleft()[0], reply) for reply in replies]
        raise WorkerGone

    def stop(self, grace_s: float = 0.0) -> int:
        """Kill it and what it started; the exit code, negative for a signal. Its own exit within `grace_s` counts."""
        end = time.monotonic() + grace_s
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < end:
            time.sleep(0.005)
        for kill in (os.killpg, os.kill):  # the group exists once the worker has made it
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        self.channel.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def parse_reply(line: bytes) -> Reply:
    try:
        score, problem = json.loads(line)
    except (ValueError, TypeError) as error:
        raise WorkerGone from error
    return score, problem


def run_worker(grade: Grade, channel: socket.socket, server: int) -> None:
    """Answer lists of arguments until the channel closes."""
    os.setpgid(0, 0)  # so that `stop` reaches what the grader forks
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            return
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    me = os.getpid()
    with channel.makefile("rb") as stream:
        while True:
            try:
                tasks = pickle.load(stream)
            except EOFError:
                return
            for arguments in tasks:
                reply = judge(grade, arguments)
                if os.getpid() != me:  # the grader forked and this is the copy
                    os._exit(0)
                channel.sendall(json.dumps(reply).encode() + b"\n")


def judge(grade: Grade, arguments: tuple[Any, ...]) -> Reply:
    try:
        score = float(grade(*arguments))
    except (Exception, SystemExit) as error:
        return None, describe_error(error)
    return (score, None) if math.isfinite(score) else (None, f"the score is {score}")


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_LENGTH]


class Server:
    def __init__(self, grade: Grade, channel: socket.socket, num_workers: int, timeout_s: float, chunk: int) -> None:
        self.grade, self.channel, self.timeout_s, self.chunk = grade, channel, timeout_s, chunk
        self.workers: list[Worker] = []
        for _ in range(num_workers):
            self.workers.append(self._new_worker())

    def _new_worker(self) -> Worker:
        return Worker(self.grade, [self.channel, *(worker.channel for worker in self.workers)])

    def run(self) -> None:
        """Serve until the pool closes its end or is gone."""
        with self.channel.makefile("rb") as stream, contextlib.suppress(EOFError, ConnectionError):
            while True:
                self._judge_all(pickle.load(stream))
        for worker in self.workers:
            worker.stop()

    def _judge_all(self, tasks: Sequence[Task]) -> None:
        waiting = deque(batched(tasks, self.chunk))
        while True:
            for worker in self.workers:
                if waiting and not worker.assigned:
                    worker.assign(waiting.popleft(), self.timeout_s)
            busy = [worker for worker in self.workers if worker.assigned]
            if not busy:
                return
            patience = min(worker.deadline for worker in busy) - time.monotonic()
            watched: list[socket.socket | Worker] = [self.channel, *busy]
            readable, _, _ = select.select(watched, [], [], max(0.0, patience))
            if self.channel in readable:  # nothing is sent while verdicts are due
                raise EOFError
            for worker in busy:
                if worker in readable:
                    try:
                        for index, reply in worker.read(self.timeout_s):
                            self._report(index, reply)
                    except WorkerGone:
                        code = worker.stop(EXIT_GRACE_S)
                        self._give_up(worker, f"the grader's process ended ({describe_exit(code)})", waiting)
                elif time.monotonic() >= worker.deadline:
                    worker.stop()
                    self._give_up(worker, f"no verdict within {self.timeout_s:g} s", waiting)

    def _give_up(self, worker: Worker, problem: str, waiting: deque[tuple[Task, ...]]) -> None:
        """Report the task that ended the worker, put the others back, and replace the worker."""
        (index, _), *rest = worker.assigned
        self._report(index, (None, problem))
        if rest:
            waiting.appendleft(tuple(rest))
        self.workers.remove(worker)
        self.workers.append(self._new_worker())

    def _report(self, index: int, reply: Reply) -> None:
        self.channel.sendall(json.dumps([index, *reply]).encode() + b"\n")


def main(fd: str, grader: str, num_workers: str, timeout_s: str, chunk: str) -> None:
    module, _, function = grader.partition(":")
    with socket.socket(fileno=int(fd)) as channel:
        try:
            grade, problem = getattr(importlib.import_module(module), function), None
        except Exception as error:
            grade, problem = None, describe_error(error)
        channel.sendall(json.dumps(problem).encode() + b"\n")
        if grade is not None:
            Server(grade, channel, int(num_workers), float(timeout_s), int(chunk)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
