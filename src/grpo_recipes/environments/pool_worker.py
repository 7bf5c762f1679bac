"""The program of one process of a GraderPool: arguments come in pickled, verdicts go out as lines of JSON."""

from __future__ import annotations

import importlib
import json
import math
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

MEMORY_LIMIT = 4 * 2**30  # bytes of address space: a runaway expression fails here before it takes the machine down
ALARM_MARGIN_S = 5.0  # the pool's own deadline comes first
ERROR_LENGTH = 300  # characters


def serve(grader: str, channel: BufferedRWPair, timeout_s: float) -> None:
    """Import the grader, say that it is ready, and answer tasks until the channel closes."""
    me = os.getpid()
    module, _, function = grader.partition(":")
    try:
        grade = getattr(importlib.import_module(module), function)
        _write(channel, None, None)
    except Exception as error:
        _write(channel, None, _text(error))
        return
    _limit_memory()
    while True:
        try:
            tasks = pickle.load(channel)
        except EOFError:
            return
        for task in tasks:
            score, problem = _judge(grade, task, timeout_s)
            if os.getpid() != me:  # the grader forked and this is the copy
                os._exit(0)
            _write(channel, score, problem)


def _judge(grade: Callable[..., float], task: tuple[Any, ...], timeout_s: float) -> tuple[float | None, str | None]:
    # The default action of SIGALRM ends this process inside any C call. It only comes to that if the pool, which kills
    # earlier, is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + ALARM_MARGIN_S)
    try:
        score = float(grade(*task))
        return (score, None) if math.isfinite(score) else (None, f"the score is {score}")
    except Exception as error:
        return None, _text(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory() -> None:
    if sys.platform != "linux":  # elsewhere the limit does not hold or cannot be set
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_LENGTH]


def _write(channel: BufferedRWPair, score: float | None, problem: str | None) -> None:
    channel.write(json.dumps({"score": score, "error": problem}).encode() + b"\n")
    channel.flush()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[2])) as connection, connection.makefile("rwb") as stream:
        serve(sys.argv[1], stream, float(sys.argv[3]))
