"""A Generator that draws while its caller does something else, as an engine in a process of its own does: a token of
every unfinished request per tick of a thread. What it draws is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from grpo_recipes.generation.contract import Completion, Request


class ThreadGenerator:
    """
    Args:
        tokens: all that is drawn for a request; None: it never comes.
        tick_s: seconds per token.
        wait: ticks before the first token of a request.
    """

    def __init__(
        self,
        tokens: Callable[[Request], Sequence[int] | None],
        tick_s: float = 0.001,
        wait: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        self.tokens, self.tick_s, self.wait = tokens, tick_s, wait
        self.waits: dict[int, int] = {}  # ticks left, by id
        self.lock = threading.Condition()
        self.active: dict[int, tuple[Sequence[int] | None, list[int]]] = {}  # by id: tokens, versions so far
        self.finished: list[Completion] = []
        self.asked: list[Request] = []
        self.version, self.paused, self.closed = 0, False, False
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while not self.closed:
            time.sleep(self.tick_s)
            with self.lock:
                for request_id, (tokens, versions) in [] if self.paused else list(self.active.items()):
                    self.waits[request_id] -= 1
                    if tokens is None or self.waits[request_id] >= 0:
                        continue
                    versions.append(self.version)
                    if len(versions) == len(tokens):
                        del self.active[request_id]
                        drawn, at = torch.tensor(tokens), torch.tensor(versions, dtype=torch.int32)
                        logprobs = torch.full((len(tokens),), -2.0)
                        self.finished.append(Completion(request_id, drawn, logprobs, at, "stop"))
                        self.lock.notify_all()

    def submit(self, requests: Sequence[Request]) -> None:
        with self.lock:
            self.asked += requests
            for request in requests:
                assert request.request_id not in self.active
                self.active[request.request_id] = self.tokens(request), []
                self.waits[request.request_id] = self.wait(request)

    def poll(self, seconds: float) -> list[Completion]:
        with self.lock:
            self.lock.wait_for(lambda: self.finished or not self.active, seconds)
            found, self.finished = self.finished, []
            return found

    def abort(self, request_ids: Sequence[int]) -> None:
        with self.lock:
            for request_id in request_ids:
                self.active.pop(request_id, None)
            self.finished = [c for c in self.finished if c.request_id not in request_ids]

    def pause(self) -> None:
        with self.lock:
            self.paused = True

    def resume(self, version: int) -> None:
        with self.lock:
            self.version, self.paused = version, False

    def close(self) -> None:
        self.closed = True
