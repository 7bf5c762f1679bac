"""Saves in the background: sealed when every rank has written and not before, waited for where the run ends."""

import errno
from types import SimpleNamespace

import pytest

from grpo_recipes.data.sampler import SamplerState
from grpo_recipes.engine import loop
from grpo_recipes.engine.checkpoint import CheckpointStore
from grpo_recipes.engine.interrupt import Interrupted, StopRequest
from grpo_recipes.engine.mismatch import BatchRefused
from grpo_recipes.engine.parts import LoopState, StepOutcome
from grpo_recipes.engine.policy_group import PolicyGroup
from grpo_recipes.engine.saver import Saver
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.compose import resolve
from grpo_recipes.runs.files import text_sha256

FULL = OSError(errno.ENOSPC, "No space left on device", "rank-00000.safetensors")


class Ranks:
    """Two ranks, of which each finishes when it is told to, or when it is waited for."""

    world_size = 2

    def __init__(self):
        self.done, self.error = [False, False], None

    def call(self, method, *args):
        if method == "start_save":
            self.done, (self.folder,) = [False, False], args
            return [None, None]
        assert method == "finish_save"
        if self.error is not None:
            raise self.error
        return [self._finish(rank, *args) for rank in (0, 1)]

    def _finish(self, rank, wait):
        if wait and not self.done[rank]:
            self.write(rank)
        return {f"rank-{rank}": text_sha256("state")} if self.done[rank] else None

    def write(self, rank):
        (self.folder / f"rank-{rank}").write_text("state")
        self.done[rank] = True


def saving(folder):
    ranks = Ranks()
    policy = object.__new__(PolicyGroup)
    policy.workers = ranks
    store = CheckpointStore(folder, keep_last=2, keep_top_k=0, higher_is_better=True)
    return ranks, policy, store, Saver(store, policy, background=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_sealed_when_every_rank_has_written_and_not_before(tmp_path):
    ranks, _, store, saver = saving(tmp_path)
    saver.save(3, {"cursor": 3}, 0.5)
    saver.poll()
    ranks.write(0)
    saver.poll()
    assert names(tmp_path) == [".writing_step_000003"]
    ranks.write(1)
    saver.poll()
    assert names(tmp_path) == ["step_000003"]
    latest = store.latest(pytest.fail)
    assert (latest.step, latest.state, latest.metric) == (3, {"cursor": 3}, 0.5)


def test_the_next_save_waits_for_the_one_before(tmp_path):
    _, _, store, saver = saving(tmp_path)
    saver.save(1, {}, None)
    saver.save(2, {}, None)
    assert names(tmp_path) == [".writing_step_000002", "step_000001"]
    assert store.latest(pytest.fail).step == 1  # as after a kill in the middle of the second write
    saver.finish()
    assert names(tmp_path) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("call", ["save", "poll", "finish"])
def test_a_full_disk_in_the_background_is_the_same_error_at_the_next_call(call, tmp_path):
    ranks, _, store, saver = saving(tmp_path)
    saver.save(1, {}, None)
    saver.finish()
    saver.save(2, {}, None)
    ranks.error = FULL
    arguments = (3, {}, None) if call == "save" else ()
    with pytest.raises(UserError, match=r"could not write the checkpoint of step 2 .*No space.*intact: step_000001"):
        getattr(saver, call)(*arguments)
    assert names(tmp_path) == ["step_000001"]
    assert store.latest(pytest.fail).step == 1


def test_files_that_cannot_be_seen_here_are_an_error(tmp_path):
    """A run folder on the local disk of each node would leave checkpoints that lack most of the state."""
    ranks, _, store, saver = saving(tmp_path)
    saver.save(1, {}, None)
    ranks.done = [True, True]
    with pytest.raises(UserError, match=r"rank-0 of the checkpoint of step 1 .*\n.*file system that all nodes share"):
        saver.finish()
    assert store.latest(pytest.fail) is None


ENDS = {"the end": (None, 4), "a stop signal": (Interrupted, 3), "a batch that is refused": (BatchRefused, 2)}
ENDS["an error of the step"] = (UserError, 2)  # its state is that of the last save


@pytest.mark.parametrize("end", ENDS)
def test_the_run_waits_for_the_write(end, tmp_path, monkeypatch):
    error, last = ENDS[end]
    _, policy, store, _ = saving(tmp_path)
    policy.peak_memory = lambda: 0
    stop = StopRequest()

    def step(parts, state, phase):
        if error in (BatchRefused, UserError) and state.step == last:
            raise error("too far off")
        with phase("policy_training"):
            if error is Interrupted and state.step + 1 == last:
                stop.signal = 2
        after = LoopState(state.step + 1, state.sampler, 0, 0)
        return StepOutcome(after, {}, {}, 1, [])

    monkeypatch.setattr(loop, "grpo_step", step)
    overrides = ["grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0", "checkpointing.save_period=2"]
    recipe = resolve("tiny_arith", [*overrides, "checkpointing.async_save=true"]).recipe
    reporter = SimpleNamespace(
        phase=lambda _: None, record=lambda *_: None, update=lambda **_: None, keep=lambda _: None
    )
    begin = (SimpleNamespace(recipe=recipe, policy=policy), LoopState(0, SamplerState(0), 0, 0), 4, set())
    if error is None:
        loop.run_loop(*begin, store, reporter, stop)
    else:
        with pytest.raises(error):
            loop.run_loop(*begin, store, reporter, stop)
    assert store.latest(pytest.fail).step == last
    assert not any(name.startswith(".") for name in names(tmp_path))
