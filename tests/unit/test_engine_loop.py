"""The loop around a step: where it stops, what it saves and what it measures. The step itself is a stand-in."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from grpo_recipes.data.sampler import SamplerState
from grpo_recipes.engine import loop
from grpo_recipes.engine.checkpoint import CheckpointStore
from grpo_recipes.engine.interrupt import Interrupted, StopRequest
from grpo_recipes.engine.parts import LoopState, StepOutcome
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.compose import resolve
from grpo_recipes.runs.files import text_sha256


def write_policy(folder):
    (folder / "w").write_text("w")
    return {"w": text_sha256("w")}


class Run:
    """A run of four steps that is asked to stop at a named point, such as ("logprobs", 2): as step 3 comes there."""

    def __init__(self, folder, monkeypatch, stop_at=None, bad_steps=0):
        overrides = ["grpo.val_period=2", "grpo.max_bad_steps=1", "checkpointing.save_period=2"]
        self.stop, self.stop_at, self.bad_steps = StopRequest(), stop_at, bad_steps
        self.store = CheckpointStore(folder, keep_last=1, keep_top_k=1, higher_is_better=True)
        self.trained, self.evaluated = [], []
        self.reporter = SimpleNamespace(
            phase=lambda _: None, record=lambda *_: None, update=lambda **_: None, keep=lambda _: None
        )
        self.parts = SimpleNamespace(
            recipe=resolve("tiny_arith", overrides).recipe,
            policy=SimpleNamespace(peak_memory=lambda: 0, save=write_policy),
        )
        monkeypatch.setattr(loop, "grpo_step", self.step)
        monkeypatch.setattr(loop, "evaluate", self.evaluate)

    def reach(self, point, step):
        if (point, step) == self.stop_at:
            self.stop.signal = 2

    def step(self, parts, state, phase):
        with phase("generation"):
            self.reach("reward", state.step)
        with phase("reward"):
            self.reach("logprobs", state.step)
        with phase("logprobs"):
            self.reach("policy_training", state.step)
        with phase("policy_training"):
            self.trained.append(state.step)
        with phase("refit"):
            pass
        after = replace(state, step=state.step + 1, bad_steps=self.bad_steps)
        return StepOutcome(after, {}, {}, 1, [])

    def evaluate(self, parts, step, **_):
        self.reach("evaluation", step)
        self.stop.check("generation")
        self.evaluated.append(step)
        return {"val/accuracy": 1 - step / 10}

    def go(self, state=None, evaluated=()):
        state = state or LoopState(0, SamplerState(0), 0, 0)
        return loop.run_loop(self.parts, state, 4, set(evaluated), self.store, self.reporter, self.stop)


@pytest.mark.parametrize("phase", ["reward", "logprobs"])
def test_a_step_is_abandoned_at_the_next_phase_before_training(phase, tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, stop_at=(phase, 2))
    with pytest.raises(Interrupted):
        run.go()
    assert run.trained == [0, 1]
    assert run.store.latest(pytest.fail).step == 2


def test_a_step_that_has_begun_to_train_is_finished(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, stop_at=("policy_training", 2))
    with pytest.raises(Interrupted):
        run.go()
    assert run.trained == [0, 1, 2]
    assert run.store.latest(pytest.fail).step == 3


def test_a_checkpoint_from_before_an_interrupted_evaluation_learns_its_metric(tmp_path, monkeypatch):
    """Step 2 is the better of the two evaluated ones, and a stop in the middle of its evaluation must not lose it."""
    run = Run(tmp_path, monkeypatch, stop_at=("evaluation", 2))
    with pytest.raises(Interrupted):
        run.go()
    stopped = run.store.latest(pytest.fail)
    assert (stopped.step, stopped.metric) == (2, None)

    run = Run(tmp_path, monkeypatch)
    run.go(loop.state_from_json(stopped.state), evaluated=[0])
    assert run.evaluated == [2, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000004"]


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, bad_steps=2)
    with pytest.raises(UserError, match=r"^grpo\.max_bad_steps: 2 optimizer steps in a row"):
        run.go()
    assert run.trained == [0]
