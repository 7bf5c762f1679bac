"""One generator over several engines. An engine that dies is replaced, and what it was drawing is drawn again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, Protocol, Self

from grpo_recipes.generation.contract import Completion, Generator, GeneratorDied, Request

POLL_S = 1.0


class Engine(Generator, Protocol):
    """A generator in processes of its own, which may end at any time. Its methods then raise GeneratorDied."""

    @property
    def alive(self) -> bool: ...

    def waitables(self) -> Sequence[Any]:
        """For multiprocessing.connection.wait: one of them is ready once something has come, or the engine is gone."""

    def close(self) -> None:
        """End its processes. May be called twice."""


class Router[E: Engine]:
    """The Generator contract over engines that all draw by the same weights.

    The samples of a prompt go to one engine, where its prefix is read once; each prompt to the engine with the fewest
    requests. Every sample has a seed of its own, so that it does not matter which engine draws it.

    Args:
        start: starts so many engines.
        count: of engines.
        catch_up: brings the trainer's weights to an engine that was started later than the others.
        max_restarts: of all engines together.
        warn: is told of each.

    Raises:
        GeneratorDied: an engine is gone, and was replaced so often already.
    """

    def __init__(
        self,
        start: Callable[[int], Sequence[E]],
        count: int,
        *,
        catch_up: Callable[[E], object],
        max_restarts: int,
        warn: Callable[[str], None],
    ) -> None:
        self._start, self._catch_up, self._warn = start, catch_up, warn
        self._max_restarts, self.restarts = max_restarts, 0
        self._requests: dict[int, Request] = {}  # those outstanding, by id
        self._place: dict[int, int] = {}  # number of the engine that draws each
        self._paused = False
        self.engines: list[E] = list(start(count))

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for a request id that is outstanding already."""
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or not ids.isdisjoint(self._requests):
            raise ValueError("request ids must differ from one another and from those outstanding")
        load = Counter(self._place.values())
        engine_of: dict[tuple[int, ...], int] = {}
        for request in requests:
            if request.prompt_ids not in engine_of:
                engine_of[request.prompt_ids] = min(range(len(self.engines)), key=lambda number: load[number])
            number = engine_of[request.prompt_ids]
            load[number] += 1
            self._requests[request.request_id], self._place[request.request_id] = request, number
        for number in range(len(self.engines)):
            if mine := [request for request in requests if self._place[request.request_id] == number]:
                self._on(number, lambda engine, mine=mine: engine.submit(mine), repeat=False)

    def poll(self, seconds: float) -> list[Completion]:
        found = self._arrived()
        if not found and self._requests and not self._paused:
            wait([w for engine in self.engines for w in engine.waitables()], seconds)
            found = self._arrived()
        return found

    def completions(self) -> Iterator[Completion]:
        while True:
            found = self.poll(POLL_S)
            yield from found
            if not self._requests or (self._paused and not found):
                return

    def abort(self, request_ids: Sequence[int]) -> None:
        for number in range(len(self.engines)):
            mine = [i for i in request_ids if self._place.get(i) == number]
            for request_id in mine:
                del self._requests[request_id], self._place[request_id]
            if mine:
                self._on(number, lambda engine, mine=mine: engine.abort(mine), repeat=False)

    def pause(self) -> None:
        self._paused = True
        self._on_all(lambda engine: engine.pause())

    def resume(self, version: int) -> None:
        self._paused = False
        self._on_all(lambda engine: engine.resume(version))

    def sleep(self) -> None:
        self._on_all(lambda engine: engine.sleep())

    def wake(self) -> None:
        self._on_all(lambda engine: engine.wake())

    def heal(self) -> None:
        """Replace engines that have died unnoticed, while nobody asked them for anything."""
        for number, engine in enumerate(self.engines):
            if not engine.alive:
                self._replace(number, "the engine's process has ended")

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- engines that die ------------------------------------------------------------------------------------------
    def _arrived(self) -> list[Completion]:
        found: list[Completion] = []
        for number in range(len(self.engines)):
            found += self._on(number, lambda engine: engine.poll(0.0), repeat=False) or []
        for completion in found:
            del self._requests[completion.request_id], self._place[completion.request_id]
        return found

    def _on_all(self, work: Callable[[E], None]) -> None:
        for number in range(len(self.engines)):
            self._on(number, work, repeat=True)

    def _on[T](self, number: int, work: Callable[[E], T], *, repeat: bool) -> T | None:
        """`repeat`: also on the engine that takes the place of a dead one; it is given the requests in any case."""
        try:
            return work(self.engines[number])
        except GeneratorDied as death:
            self._replace(number, str(death))
        return work(self.engines[number]) if repeat else None

    def _replace(self, number: int, reason: str) -> None:
        while True:
            self.engines[number].close()
            if self.restarts >= self._max_restarts:
                raise GeneratorDied(
                    f"{reason}; engines were restarted {self.restarts} times, which is all that is allowed"
                )
            self.restarts += 1
            lost = [request for i, request in self._requests.items() if self._place[i] == number]
            self._warn(
                f"{reason}; engine {number} is started anew (restart {self.restarts} of {self._max_restarts}), "
                f"{len(lost)} requests are repeated"
            )
            try:
                [self.engines[number]] = self._start(1)
                self._catch_up(self.engines[number])
                if self._paused:
                    self.engines[number].pause()
                self.engines[number].submit(lost)
            except GeneratorDied as death:
                reason = str(death)
            else:
                return
