"""The shell script around a local job: notes its process, gathers its output, keeps its exit status."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from grpo_recipes.runs.folder import RunFolder

KILLED = 137  # the shell's status for a job ended by SIGKILL: the script, killed with it, could not write one


def job_script(folder: RunFolder, command: Sequence[str]) -> str:
    """Runs `command` with its output appended to the run's log. The job's id is known before Python is up."""
    pid, log, code = (shlex.quote(str(p)) for p in (folder.pid_path, folder.log_path, _exit_path(folder)))
    return f"""bash -c 'echo $$ > "$0" && exec "$@"' {pid} {shlex.join(command)} </dev/null >>{log} 2>&1
status=$?
echo $status >{code}
exit $status
"""


def reset(folder: RunFolder) -> None:
    """Forget the process of an earlier attempt."""
    folder.pid_path.unlink(missing_ok=True)
    _exit_path(folder).unlink(missing_ok=True)


def job_pid(folder: RunFolder) -> int | None:
    """None before the job has started."""
    words = folder.pid_path.read_text().split() if folder.pid_path.is_file() else []
    return int(words[0]) if words else None


def exit_code(folder: RunFolder) -> int:
    """Of a job that has ended."""
    path = _exit_path(folder)
    return int(path.read_text()) if path.is_file() else KILLED


def _exit_path(folder: RunFolder) -> Path:
    return folder.path / "job.exit"
