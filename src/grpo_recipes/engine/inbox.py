"""Completions by request: rollouts in flight and an evaluation may share one generator at the same time."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from grpo_recipes.generation.contract import Completion, Generator, Request


class Inbox:
    """Whoever polls keeps what others have asked for. Training numbers its requests from 0 up, evaluation from -1 down."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._arrived: dict[int, Completion] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        if requests:
            self.generator.submit(requests)

    def take(self, request_ids: Collection[int], seconds: float) -> list[Completion]:
        """Those of these requests that have arrived, in order of arrival; waits up to so many seconds for the first."""
        if self._arrived.keys().isdisjoint(request_ids):
            start = time.monotonic()
            arrived = self.generator.poll(seconds)
            self._arrived |= {completion.request_id: completion for completion in arrived}
            if not arrived and time.monotonic() - start < seconds / 2:  # it has nothing outstanding, as it believes
                time.sleep(seconds / 2)
        found = [request_id for request_id in self._arrived if request_id in request_ids]
        return [self._arrived.pop(request_id) for request_id in found]

    def abort(self, request_ids: Collection[int]) -> None:
        """None of them is taken after this."""
        self.generator.abort(list(request_ids))
        for request_id in request_ids:
            self._arrived.pop(request_id, None)
