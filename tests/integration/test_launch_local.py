"""A stand-in job, really launched by NeMo-Run, from a launcher in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_recipes.runs.folder import RunFolder, list_runs, process_alive

LAUNCHER = """
import sys
from grpo_recipes.errors import UserError
from grpo_recipes.launch.run import launch
from grpo_recipes.recipe.compose import resolve

mode, recipe, run_dir, job, *arguments = sys.argv[1:]
try:
    resolved = resolve(recipe, ["grpo.seed=7"] if mode == "other" else [])
    code = launch(resolved, run_dir, resume=mode != "new", job=(sys.executable, job, *arguments))
except UserError as error:
    print(error, file=sys.stderr)
    code = 2
sys.exit(code)
"""

# Says how far it is as the real job does; ends as its first argument says.
JOB = """
import os, signal, sys, time
from grpo_recipes.runs.folder import RunFolder, write_pid
from grpo_recipes.runs.progress import Progress, write_progress
from pathlib import Path

how, run_dir = sys.argv[1], sys.argv[2]
folder, asked, began = RunFolder(Path(run_dir)), [], time.time()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: asked.append(number))
write_pid(folder)
mark = folder.path / "steps"
first = len(mark.read_text().split()) if mark.exists() else 0

def say(step, status="running"):
    write_progress(folder, Progress(1, step, 4, "generation", 0.5, step / 8, 99.0, began, time.time(), status))

print("variable", os.environ.get("PROBE"), os.path.dirname(sys.executable) == os.environ["PATH"].split(os.pathsep)[0])
for step in range(first + 1, 5):
    with mark.open("a") as file:
        file.write(f"{step}\\n")
    say(step)
    print("step", step, flush=True)
    while how in ("wait", "deaf") and not (asked and how == "wait") and not (folder.path / "go on").exists():
        time.sleep(0.05)
    if asked and how == "wait":
        say(step, "interrupted")
        sys.exit(130)
    if how == "fail" and step == 3:
        print("\\n".join(f"trace {line}" for line in range(40)), file=sys.stderr)
        sys.exit(5)
    if how == "killed" and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
say(4, "finished")
"""

RECIPE = """
description: a recipe that no engine reads here
stack: "2026.11"
grpo: {max_num_steps: 4, max_val_samples: 10, num_prompts_per_step: 2, num_generations_per_prompt: 2}
policy:
  model_name: nowhere
  train_global_batch_size: 4
  max_total_sequence_length: 32
  megatron_cfg: {optimizer: {lr: 0.001}}
  generation: {max_new_tokens: 8}
data:
  train: {dataset_name: reasoning_gym, task: chain_sum, size: 10, seed: 1}
  validation: {dataset_name: reasoning_gym, task: chain_sum, size: 10, seed: 100}
  max_input_seq_length: 16
  env_name: reasoning_gym
"""


class Launch:
    """A launcher process and the folder of its run."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp, self.folder = tmp_path, RunFolder(tmp_path / "runs" / "some-run")
        for name, text in {"launcher.py": LAUNCHER, "job.py": JOB, "probe.yaml": RECIPE}.items():
            (tmp_path / name).write_text(text)
        self.home = tmp_path / "home"

    def start(self, how: str, mode: str = "new") -> subprocess.Popen[str]:
        words = [mode, str(self.tmp / "probe.yaml"), str(self.folder.path), str(self.tmp / "job.py"), how]
        return subprocess.Popen(
            [sys.executable, str(self.tmp / "launcher.py"), *words],
            env={**os.environ, "NEMORUN_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.tmp,
        )

    def run(self, how: str, mode: str = "new") -> tuple[int, str, str]:
        process = self.start(how, mode)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def wait_for_step(self, launcher: subprocess.Popen[str]) -> None:
        def there() -> bool:
            assert launcher.poll() is None, launcher.communicate()
            return self.folder.log_path.is_file() and "step 1" in self.folder.log_path.read_text()

        self.wait_for(there)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    if process_alive(launch.folder):
        os.kill(int(launch.folder.pid_path.read_text().split()[0]), signal.SIGKILL)


def test_a_job_runs_to_its_end_and_its_output_is_kept(launched: Launch) -> None:
    (launched.home / "launchers").mkdir(parents=True)
    (launched.home / "launchers" / "local.yaml").write_text("executor: local\nenv: {PROBE: a b}\n")
    code, out, err = launched.run("finish")
    assert (code, err) == (0, "")
    assert "4/4  reward 0.500  accuracy 0.500  99 tok/s  finished" in out
    assert "finished in" in out
    assert launched.folder.log_path.read_text().splitlines() == [
        "variable a b True",
        *(f"step {step}" for step in range(1, 5)),
    ]
    # What NeMo-Run itself keeps of it is found by its own commands.
    (experiment,) = (launched.home / "experiments" / "some-run").iterdir()
    assert (experiment / "_DONE").exists()
    assert "SUCCEEDED" in json.dumps(json.loads((launched.home / ".local_jobs.json").read_text()))

    code, out, err = launched.run("finish")
    assert code == 2
    assert "the run folder exists and is not empty" in err


def test_a_failed_job_gives_its_exit_status_and_the_end_of_its_log(launched: Launch) -> None:
    """Covers: a failed experiment that exits 0; a crash without logs."""
    code, _out, err = launched.run("fail")
    assert code == 5
    assert "the job failed with exit status 5" in err
    assert "trace 39" in err
    assert "trace 20\n" in err
    assert "trace 19\n" not in err
    assert "--resume" not in err  # it left no checkpoint


def test_a_killed_job_is_a_failure(launched: Launch) -> None:
    code, _out, err = launched.run("killed")
    assert code == 137
    assert "exit status 137" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_is_passed_on_and_the_run_resumes(launched: Launch, number: signal.Signals) -> None:
    process = launched.start("wait")
    launched.wait_for_step(process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "saves a checkpoint" in out
    assert f"nemo-run recipe {launched.tmp / 'probe.yaml'} --resume {launched.folder.path}" in out
    assert launched.folder.log_path.read_text().splitlines()[1:] == ["step 1"]

    code, out, err = launched.run("finish", mode="other")
    assert code == 2
    assert "started with another recipe; they differ in grpo.seed" in err

    code, out, err = launched.run("finish", mode="resume")
    assert (code, err) == (0, "")
    assert (launched.folder.path / "steps").read_text().split() == ["1", "2", "3", "4"]


def test_a_second_interrupt_kills(launched: Launch) -> None:
    process = launched.start("deaf")
    launched.wait_for_step(process)
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None
    assert process_alive(launched.folder) is True
    process.send_signal(signal.SIGINT)
    out, _err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert process_alive(launched.folder) is False
    assert "killing the job" in out


def test_the_job_outlives_its_launcher(launched: Launch) -> None:
    process = launched.start("deaf")
    launched.wait_for_step(process)
    process.kill()
    process.communicate(timeout=60)
    assert process_alive(launched.folder) is True
    (run,) = list_runs(launched.folder.path.parent)
    assert (run.name, run.status, run.step) == ("some-run", "running", 1)

    code, _out, err = launched.run("finish", mode="resume")
    assert code == 2
    assert "this run is still going" in err

    (launched.folder.path / "go on").touch()
    launched.wait_for(lambda: process_alive(launched.folder) is False)
    assert launched.folder.log_path.read_text().splitlines()[-1] == "step 4"


def test_an_unusable_home_is_one_clear_error(launched: Launch) -> None:
    launched.home.write_text("a file")
    code, _out, err = launched.run("finish")
    assert code == 2
    assert err.startswith(f"NEMORUN_HOME={launched.home}: NeMo-Run cannot keep its files here")
    assert not launched.folder.path.exists()


def test_nemo_runs_own_command_has_the_recipe_command() -> None:
    code = """
from grpo_recipes.launch.nemo_run_import import import_nemo_run
import_nemo_run()
from nemo_run.cli.api import Typer, _add_typer_nested, _get_or_add_typer, list_entrypoints
import grpo_recipes.nemorun_plugin
app = Typer(pretty_exceptions_enable=False)
_get_or_add_typer(app, name="recipe")  # as NeMo-Run does for each entry point, before it loads it
_get_or_add_typer(app, name="another")
_add_typer_nested(app, list_entrypoints())
app(["recipe", "no_such_recipe", "--dry-run"])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 2
    assert "no recipe is called 'no_such_recipe'" in out.stderr
