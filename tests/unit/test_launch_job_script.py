from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from grpo_recipes.launch.job_script import KILLED, exit_code, job_pid, job_script, reset
from grpo_recipes.runs.folder import RunFolder, create_run, process_alive


def run(folder: RunFolder, code: str) -> int:
    script = job_script(folder, [sys.executable, "-c", code, "it's"])
    return subprocess.run(["bash", "-c", script], check=False).returncode


def test_output_process_and_exit_status_are_kept(tmp_path: Path) -> None:
    folder = create_run(tmp_path / "a run's folder")
    code = "import os, sys; print(os.getpid(), sys.argv[1]); print('bad', file=sys.stderr); sys.exit(7)"
    assert run(folder, code) == 7
    assert exit_code(folder) == 7
    assert folder.log_path.read_text() == f"{job_pid(folder)} it's\nbad\n"
    assert process_alive(folder) is False


def test_a_killed_job_has_the_shells_status(tmp_path: Path) -> None:
    folder = create_run(tmp_path / "run")
    assert run(folder, "import os; os.kill(os.getpid(), 9)") == KILLED
    assert exit_code(folder) == KILLED


def test_reset_forgets_an_earlier_attempt_but_not_its_log(tmp_path: Path) -> None:
    folder = create_run(tmp_path / "run")
    run(folder, "print('first')")
    reset(folder)
    assert job_pid(folder) is None
    assert process_alive(folder) is None
    assert exit_code(folder) == KILLED  # no status: the script itself was killed
    run(folder, "print('second')")
    assert folder.log_path.read_text() == "first\nsecond\n"
