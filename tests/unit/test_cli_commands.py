"""The command line: thin, quick to start, one clear error for a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes import __version__, cli
from grpo_recipes.recipe.compose import load_resolved, resolve
from grpo_recipes.recipe.yaml_files import parse
from grpo_recipes.runs.mode import Mode


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "grpo_recipes.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


class Outcome(SimpleNamespace):
    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`call("show", "tiny_arith")` in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["nemo-run", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(code=end.value.code or 0, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the launcher was asked; it answers with exit status 5."""
    import grpo_recipes.launch.run as launch_run
    import grpo_recipes.recipe.model_folder as model_folder

    calls: list[Any] = []
    monkeypatch.setattr(launch_run, "launch", lambda *args, **kwargs: calls.append((args, kwargs)) or 5)
    monkeypatch.setattr(model_folder, "check_model", lambda policy: calls.append(policy.model_name))
    return calls


def test_nothing_but_pydantic_and_typer_is_needed_to_start() -> None:
    """Covers: slow commands. --help, recipes and show may not import what they do not need."""
    heavy = ["torch", "transformers", "datasets", "nemo_run", "megatron", "numpy", "huggingface_hub", "reasoning_gym"]
    for arguments in (["--help"], ["recipes"], ["show", "tiny_arith"], ["runs"]):
        code = (
            f"import sys; sys.argv = ['nemo-run', *{arguments}]\n"
            "from grpo_recipes import cli\n"
            "try: cli.main()\n"
            "except SystemExit: pass\n"
            f"print([name for name in {heavy} if name in sys.modules])"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert out.stdout.splitlines()[-1] == "[]", arguments


def test_a_mistake_is_one_message_without_a_traceback() -> None:
    done = run("recipe", "tiny_arth")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: recipe: no recipe is called 'tiny_arth'\n  -> did you mean tiny_arith or tiny_arith_warmstart?\n"
    )


def test_completion() -> None:
    script = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert script.returncode == 0, script.stderr
    assert "complete -o default -F _nemo_run_completion nemo-run" in script.stdout
    ask = {"_NEMO_RUN_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    assert run(COMP_WORDS="nemo-run show tiny_arith_", **ask).stdout.split() == [
        "tiny_arith_warmstart",
        "tiny_arith_warmstart@v1",
    ]
    ask["COMP_CWORD"] = "3"
    assert run(COMP_WORDS="nemo-run show tiny_arith grpo.see", **ask).stdout.split() == ["grpo.seed="]


def test_help_and_version(call: Any) -> None:
    shown = call("--help")
    assert shown.code == 0
    for command in (
        "recipe",
        "recipes",
        "show",
        "runs",
        "report",
        "verify",
        "diff",
        "convert",
        "version",
        "experiment",
    ):
        assert f" {command} " in shown.out
    assert call("version").out == f"{__version__}\n"


def test_recipes(call: Any) -> None:
    lines = call("recipes").out.splitlines()
    assert lines[0].split() == ["recipe", "version", "model", "data", "devices", "evidence"]
    line = next(line for line in lines if line.startswith("tiny_arith "))
    assert line.split()[1:7] == ["v1", "recipe:tiny_arith/model", "chain_sum", "1", "CPU", "process"]


def test_show(call: Any) -> None:
    shown = call("show", "tiny_arith", "grpo.seed=7").out
    values = parse(shown, "shown")
    assert values == resolve("tiny_arith", ["grpo.seed=7"]).recipe.model_dump(mode="json")
    origins = {line.split(":")[0].strip(): line.rpartition("# ")[2] for line in shown.splitlines()}
    assert origins["ratio_clip_c"] == "schema default"
    assert origins["precision"] == "base _base/cpu.yaml"
    assert origins["model_name"] == "recipe tiny_arith/v1.yaml"
    assert "seed: 7 " in shown
    assert shown.count("# override") == 1


def test_show_digest_and_yaml(call: Any, tmp_path: Path) -> None:
    assert call("show", "tiny_arith", "--digest").out == f"{resolve('tiny_arith').digest}\n"
    (tmp_path / "mine.yaml").write_text(call("show", "tiny_arith", "grpo.seed=7", "--yaml").out)
    again = call("show", "mine.yaml", "--yaml").out
    assert parse(again, "again")["grpo"]["seed"] == 7
    assert resolve("mine.yaml").recipe == resolve("tiny_arith", ["grpo.seed=7"]).recipe


def test_recipe_launches(call: Any, launched: list[Any], tmp_path: Path) -> None:
    done = call("recipe", "tiny_arith", "grpo.seed=7", "data.prompt=a b; $(c)\n{question}", "--dry-run")
    assert done.code == 5
    (model, ((resolved, run_dir), options)) = launched
    assert model == "recipe:tiny_arith/model"
    assert resolved == resolve("tiny_arith", ["grpo.seed=7", "data.prompt=a b; $(c)\n{question}"])
    assert run_dir.parent == Path("runs")
    assert run_dir.name.startswith("tiny_arith-20")
    assert options == {"executor": "local", "resume": False, "dry_run": True, "mode": Mode()}
    assert list(tmp_path.iterdir()) == []


def test_recipe_refuses_before_anything_is_launched(call: Any, launched: list[Any]) -> None:
    done = call("recipe", "tiny_arith", "grpo.sed=7", "policy.precision=x")
    assert (done.code, done.out, launched) == (2, "", [])
    assert done.err.startswith("error: 2 mistakes in tiny_arith v1:\n- ")


def test_recipe_checks_the_model(call: Any) -> None:
    done = call("recipe", "smollm2_135m", "policy.model_name=nowhere", "--dry-run")
    assert done.code == 2
    assert done.err.startswith("error: policy.model_name: no folder nowhere")


def test_run_directories_do_not_collide(call: Any, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import datetime as module

    class Fixed(module.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Fixed:
            return cls(2026, 11, 30, 12, 0, 0)

    monkeypatch.setattr(cli, "datetime", Fixed)
    Path("runs/tiny_arith-20261130-120000").mkdir(parents=True)
    call("recipe", "tiny_arith")
    call("recipe", "tiny_arith", "--run-dir", "elsewhere")
    assert [entry[0][1] for entry in launched if isinstance(entry, tuple)] == [
        Path("runs/tiny_arith-20261130-120000-2"),
        Path("elsewhere"),
    ]


def test_resume(call: Any, launched: list[Any]) -> None:
    resolved = resolve("tiny_arith", ["grpo.seed=7"])
    folder = Path("runs/first")
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(resolved.to_yaml(), encoding="utf-8")
    for reference in ("first", "runs/first"):
        assert call("recipe", "tiny_arith", "--resume", reference).code == 5
        args, options = launched[-1]
        assert args == (load_resolved(folder / "recipe.yaml"), folder)
        assert options == {"executor": "local", "resume": True, "dry_run": False, "mode": Mode()}
    count = len(launched)
    for arguments, expected in {
        ("tiny_arith", "grpo.seed=8", "--resume", "first"): "leave grpo.seed=8 out",
        ("tiny_arith", "--run-dir", "x", "--resume", "first"): "leave --run-dir out",
        ("smollm2_135m", "--resume", "first"): "is a run of tiny_arith@v1, not of smollm2_135m",
        ("tiny_arith@v9", "--resume", "first"): "is a run of tiny_arith@v1, not of tiny_arith@v9",
        ("tiny_arith", "--resume", "nowhere"): "no such run folder",
    }.items():
        done = call("recipe", *arguments)
        assert done.code == 2
        assert expected in done.err
    assert len(launched) == count


def test_runs(call: Any) -> None:
    assert call("runs").out == "no runs in runs\n"
    folder = Path("runs/first")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"recipe": {"name": "tiny_arith", "version": "v1"}}))
    heading, line = call("runs").out.splitlines()
    assert heading.split() == ["run", "recipe", "status", "step", "reward", "accuracy", "started"]
    assert line.split() == ["first", "tiny_arith@v1", "starting", "-", "-", "-", "-"]
    assert call("runs", "--dir", "elsewhere").out == "no runs in elsewhere\n"


def test_verify_exits_with_the_verdict(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import grpo_recipes.proof.verify as proof

    asked = []

    def verify(run_dir: Path, against: Path | None) -> Any:
        asked.append((run_dir, against))
        return SimpleNamespace(outcome="not reproduced", exit_code=1, lines=("one", "two"))

    monkeypatch.setattr(proof, "verify", verify)
    Path("runs/first").mkdir(parents=True)
    done = call("verify", "first")
    assert (done.code, done.out) == (1, "one\ntwo\nnot reproduced\n")
    call("verify", "first", "--against", "band.json")
    assert asked == [(Path("runs/first"), None), (Path("runs/first"), Path("band.json"))]


def test_diff_of_recipes(call: Any) -> None:
    Path("a.yaml").write_text(call("show", "tiny_arith", "--yaml").out)
    Path("b.yaml").write_text(call("show", "tiny_arith", "grpo.seed=7", "--yaml").out)
    assert call("diff", "a.yaml", "a.yaml").out == "no difference\n"
    assert call("diff", "a.yaml", "b.yaml").out == f"grpo.seed: {resolve('tiny_arith').recipe.grpo.seed} -> 7\n"
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/recipe.yaml").write_text("x: 1\n")
    assert "first is a run and a.yaml is not" in call("diff", "a.yaml", "first").err
    assert "first is a run and a.yaml is not" in call("diff", "first", "a.yaml").err


def test_unknown_options_exit_2(call: Any) -> None:
    assert call("recipe", "tiny_arith", "--no-such-option").code == 2
