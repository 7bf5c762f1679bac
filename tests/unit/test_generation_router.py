"""Several engines behind one generator. The engines are stand-ins that finish what they are told to, or die."""

import pytest
import torch

from grpo_recipes.generation.contract import Completion, GeneratorDied, Request, Sampling
from grpo_recipes.generation.router import Router

SAMPLING = Sampling(1.0, 4, (0,))


class Engine:
    def __init__(self, number, log):
        self.number, self.log, self.alive, self.held, self.ready = number, log, True, {}, []

    def _check(self, *what):
        if not self.alive:
            raise GeneratorDied(f"engine process {self.number} is gone")
        self.log.append((self.number, *what))

    def submit(self, requests):
        self._check("submit", [r.request_id for r in requests])
        self.held |= {r.request_id: r for r in requests}

    def finish(self, *ids):
        self.ready += [completion(self.held.pop(i)) for i in ids]

    def poll(self, seconds):
        if not self.alive and self.held:
            raise GeneratorDied(f"engine process {self.number} is gone")
        found, self.ready = self.ready, []
        return found

    def abort(self, ids):
        self._check("abort", list(ids))

    def pause(self):
        self._check("pause")

    def resume(self, version):
        self._check("resume", version)

    def sleep(self):
        self._check("sleep")

    def wake(self):
        self._check("wake")

    def waitables(self):
        return []

    def close(self):
        self.alive = False


def completion(request):
    """What is drawn is the seed's alone."""
    drawn = torch.Generator().manual_seed(request.seed)
    ids = torch.randint(0, 9, (3,), generator=drawn)
    return Completion(request.request_id, ids, torch.zeros(3), torch.zeros(3, dtype=torch.int32), "stop")


def make(count=2, max_restarts=1):
    started, log, warnings, caught_up = [], [], [], []

    def start(number):
        new = [Engine(len(started) + n, log) for n in range(number)]
        started.extend(new)
        return new

    router = Router(start, count, catch_up=caught_up.append, max_restarts=max_restarts, warn=warnings.append)
    return router, started, log, warnings, caught_up


def requests(prompts, samples=2):
    return [Request(p * samples + s, (p,), 100 + p * samples + s, SAMPLING) for p in prompts for s in range(samples)]


def test_samples_of_a_prompt_share_an_engine_and_prompts_are_spread():
    router, _, log, _, _ = make(count=2)
    router.submit(requests([0, 1, 2]))
    assert log == [(0, "submit", [0, 1, 4, 5]), (1, "submit", [2, 3])]
    router.submit(requests([3]))
    assert log[-1] == (1, "submit", [6, 7])  # it has fewer
    with pytest.raises(ValueError, match="differ"):
        router.submit(requests([3]))


def test_completions_come_from_every_engine_until_none_is_left():
    router, (a, b), _, _, _ = make()
    router.submit(requests([0, 1]))
    a.finish(1)
    b.finish(2, 3)
    stream = router.completions()
    assert [next(stream).request_id for _ in range(3)] == [1, 2, 3]
    a.finish(0)
    assert [c.request_id for c in stream] == [0]
    assert router.poll(0.0) == []


def test_a_dead_engine_is_replaced_and_draws_the_same_again():
    router, started, log, warnings, caught_up = make()
    router.submit(requests([0, 1]))
    wanted = {r.request_id: completion(r).token_ids.tolist() for r in requests([0, 1])}
    started[0].finish(0)
    assert [c.request_id for c in router.poll(0.0)] == [0]
    started[0].alive = False
    assert router.poll(0.0) == []
    assert log[-1] == (2, "submit", [1])  # what had arrived is not drawn again
    assert caught_up == [started[2]] and router.engines == [started[2], started[1]]
    assert warnings == ["engine process 0 is gone; engine 0 is started anew (restart 1 of 1), 1 requests are repeated"]
    started[2].finish(1)
    started[1].finish(2, 3)
    assert {c.request_id: c.token_ids.tolist() for c in router.completions()} == {i: wanted[i] for i in (1, 2, 3)}


def test_after_so_many_restarts_the_run_ends():
    router, started, _, _, _ = make(max_restarts=1)
    router.submit(requests([0, 1]))
    started[0].alive = False
    router.poll(0.0)
    started[1].alive = False
    with pytest.raises(GeneratorDied, match="engine process 1 is gone; engines were restarted 1 times"):
        router.poll(0.0)
    assert not any(engine.alive for engine in router.engines if engine is started[1])


def test_an_engine_that_dies_while_paused_is_replaced_by_a_paused_one():
    router, started, log, _, _ = make()
    router.submit(requests([0]))
    router.pause()
    started[0].alive = False
    router.resume(3)
    assert log[-2:] == [(2, "resume", 3), (1, "resume", 3)]
    router.pause()
    started[2].alive = False
    with pytest.raises(GeneratorDied):  # no restart is left
        router.heal()


def test_a_death_that_nobody_noticed_is_mended_before_a_refit():
    router, started, _, warnings, caught_up = make()
    started[1].alive = False
    router.heal()
    assert caught_up == [started[2]] and "has ended" in warnings[0]
    router.heal()
    assert len(warnings) == 1


def test_aborted_requests_are_asked_of_their_engines_only():
    router, (a, b), log, _, _ = make()
    router.submit(requests([0, 1]))
    router.abort([2, 99])
    assert log[-1] == (1, "abort", [2])
    a.finish(0, 1)
    b.finish(3)
    assert sorted(c.request_id for c in router.completions()) == [0, 1, 3]
