import importlib.util
import json
import sys
import types
from importlib.machinery import ModuleSpec

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.runs.folder import create_run
from grpo_recipes.runs.rollouts import Rollout, read_rollouts, rollout_steps, write_rollouts
from grpo_recipes.runs.sinks import check_sinks, open_sinks


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path / "run-a")


ROLLOUTS = [
    Rollout(
        prompt="23+45=", response="6\u20288\n\ud800", reward=1.0, advantage=float("nan"), finish_reason="stop",
        token_ids=(6, 8), logprobs=(-0.1, float("-inf")), trainer_logprobs=(-0.1, -0.2), tokens=("6", "8"), group=3,
    ),
    Rollout(prompt="1+1=", response="", reward=None, advantage=None, finish_reason="length", error="timed out"),
]  # fmt: skip


def test_rollouts_come_back_whatever_the_model_wrote(run):
    path = write_rollouts(run, 40, ROLLOUTS)
    assert path.name == "step_000040.jsonl"
    assert repr(read_rollouts(run, 40)) == repr(ROLLOUTS)  # repr: nan is not equal to itself
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[0]["logprob_stats"] == {"mean": "-inf", "min": "-inf"}
    assert "logprob_stats" not in lines[1]


def test_a_second_attempt_replaces_the_rollouts_of_a_step(run):
    write_rollouts(run, 2, ROLLOUTS)
    write_rollouts(run, 2, ROLLOUTS[1:])
    write_rollouts(run, 10, ROLLOUTS)
    assert rollout_steps(run) == [2, 10]
    assert read_rollouts(run, 2) == ROLLOUTS[1:]
    with pytest.raises(UserError, match="no rollouts of step 3") as caught:
        read_rollouts(run, 3)
    assert "2, 10" in caught.value.mend


@pytest.mark.parametrize("bad", ["{", '{"prompt": 1}', "[]"])
def test_a_damaged_rollout_names_its_line(run, bad):
    path = write_rollouts(run, 2, ROLLOUTS[1:])
    path.write_text(path.read_text() + bad + "\n")
    with pytest.raises(UserError, match="line 2"):
        read_rollouts(run, 2)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named_before_work_starts(run, name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"logger.{name}") as caught:
        open_sinks(run, [name], "p", {})
    assert "pip install grpo-recipes[sinks]" in caught.value.mend


def test_a_folder_of_that_name_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])
    with pytest.raises(UserError, match="not installed"):
        check_sinks(["trackio"])


def fake(monkeypatch, name, **members):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, origin="fake")
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def recorder(calls, name, result=None):
    def call(*args, **kwargs):
        calls.append((name, args, kwargs))
        return result

    return call


def test_wandb_gets_steps_as_a_value_so_that_a_resumed_run_may_go_back(run, monkeypatch):
    calls = []
    wandb_run = types.SimpleNamespace(
        define_metric=recorder(calls, "define"), log=recorder(calls, "log"), finish=recorder(calls, "finish")
    )
    fake(monkeypatch, "wandb", init=recorder(calls, "init", wandb_run))
    (sink,) = open_sinks(run, ["wandb"], "proj", {"a": {"b": 1}})
    sink.log(5, {"train/reward": 0.5})
    sink.log(3, {"train/reward": 0.25})
    sink.close()
    assert calls[0][2]["project"] == "proj"
    assert calls[0][2]["config"] == {"a": {"b": 1}}
    assert calls[0][2]["id"] == "run-a"
    assert calls[0][2]["resume"] == "allow"
    assert calls[1:] == [
        ("define", ("*",), {"step_metric": "step"}),
        ("log", ({"train/reward": 0.5, "step": 5},), {}),
        ("log", ({"train/reward": 0.25, "step": 3},), {}),
        ("finish", (), {}),
    ]


def test_mlflow_gets_the_values(run, monkeypatch):
    calls = []
    names = ("set_experiment", "start_run", "log_dict", "log_metrics", "end_run")
    fake(monkeypatch, "mlflow", **{name: recorder(calls, name) for name in names})
    (sink,) = open_sinks(run, ["mlflow"], "proj", {"a": 1})
    sink.log(5, {"train/reward": 0.5})
    sink.close()
    assert calls == [
        ("set_experiment", ("proj",), {}),
        ("start_run", (), {"run_name": "run-a"}),
        ("log_dict", ({"a": 1}, "recipe.json"), {}),
        ("log_metrics", ({"train/reward": 0.5},), {"step": 5}),
        ("end_run", (), {}),
    ]


def test_trackio_gets_the_values(run, monkeypatch):
    calls = []
    fake(monkeypatch, "trackio", **{name: recorder(calls, name) for name in ("init", "log", "finish")})
    (sink,) = open_sinks(run, ["trackio"], "proj", {"a": 1})
    sink.log(5, {"train/reward": 0.5})
    sink.close()
    assert calls == [
        ("init", (), {"project": "proj", "name": "run-a", "config": {"a": 1}, "resume": "allow"}),
        ("log", ({"train/reward": 0.5},), {"step": 5}),
        ("finish", (), {}),
    ]


def test_tensorboard_gets_the_values(run, monkeypatch):
    calls = []
    writer = types.SimpleNamespace(add_event=recorder(calls, "event"), close=recorder(calls, "close"))
    fake(monkeypatch, "tensorboard")
    for name in ("compat", "compat.proto", "summary", "summary.writer"):
        fake(monkeypatch, f"tensorboard.{name}")
    fake(monkeypatch, "tensorboard.compat.proto.event_pb2", Event=dict)
    fake(
        monkeypatch,
        "tensorboard.compat.proto.summary_pb2",
        Summary=type("Summary", (dict,), {"Value": dict}),
    )
    fake(
        monkeypatch,
        "tensorboard.summary.writer.event_file_writer",
        EventFileWriter=lambda folder: calls.append(("open", folder)) or writer,
    )
    (sink,) = open_sinks(run, ["tensorboard"], "proj", {})
    sink.log(5, {"train/reward": 0.5})
    sink.close()
    assert calls[0] == ("open", str(run.path / "tensorboard"))
    event = calls[1][1][0]
    assert event["step"] == 5
    assert event["summary"] == {"value": [{"tag": "train/reward", "simple_value": 0.5}]}
    assert calls[2] == ("close", (), {})


if importlib.util.find_spec("tensorboard"):

    def test_tensorboard_itself_reads_the_events(run):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (sink,) = open_sinks(run, ["tensorboard"], "proj", {})
        sink.log(5, {"train/reward": 0.5, "train/loss": 0.25})
        sink.log(6, {"train/reward": 0.75})
        sink.close()
        events = EventAccumulator(str(run.path / "tensorboard")).Reload()
        assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(5, 0.5), (6, 0.75)]
        assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(5, 0.25)]
