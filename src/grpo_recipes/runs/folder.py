"""Where everything of a run lies, and which runs there are."""

from __future__ import annotations

import difflib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.errors import UserError
from grpo_recipes.runs.files import write_atomically


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run. Holds no state: two processes may look at the same folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def recipe_path(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def mode_path(self) -> Path:
        return self.path / "mode.json"

    @property
    def arrivals_path(self) -> Path:
        return self.path / "arrivals.jsonl"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts_dir(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def progress_path(self) -> Path:
        return self.path / "progress.json"

    @property
    def log_path(self) -> Path:
        return self.path / "log.txt"

    @property
    def pid_path(self) -> Path:
        return self.path / "job.pid"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"


@dataclass(frozen=True)
class RunSummary:
    """One line of `nemo-run runs`. What the run has not said yet is None."""

    name: str
    path: Path
    recipe: str | None
    version: str | None
    status: str  # as in progress.json; "dead" where that says "running" but the process is gone; "damaged"
    step: int | None
    max_steps: int | None
    reward: float | None
    accuracy: float | None
    started: float | None  # seconds since the epoch


def create_run(path: str | Path) -> RunFolder:
    """Make the folder of a new run. Raises UserError if it is in use or cannot be written."""
    folder = RunFolder(Path(path))
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError("is a file, not a folder", where=str(path), mend="choose another --run-dir")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        in_use = next(folder.path.iterdir(), None) is not None
        if not in_use:
            folder.rollouts_dir.mkdir()
            folder.checkpoints_dir.mkdir()
    except OSError as error:
        raise UserError(
            f"the run folder cannot be made: {error.strerror}",
            where=str(path),
            mend="choose a --run-dir that you may write to",
        ) from error
    if in_use:
        raise UserError(
            "the run folder exists and is not empty",
            where=str(path),
            mend=f"choose another --run-dir, or go on with that run: --resume {path}",
        )
    return folder


def open_run(path: str | Path) -> RunFolder:
    """An existing run. Raises UserError, naming the nearest run beside it, if there is none."""
    folder = RunFolder(Path(path))
    if folder.manifest_path.is_file() or folder.recipe_path.is_file():
        return folder
    siblings = _run_names(folder.path.parent) if folder.path.parent.is_dir() else []
    near = difflib.get_close_matches(folder.path.name, siblings, n=3)
    what = "holds neither manifest.json nor recipe.yaml" if folder.path.is_dir() else "no such run folder"
    mend = f"nearest: {', '.join(near)}" if near else "`nemo-run runs` lists the runs there are"
    raise UserError(what, where=str(path), mend=mend)


def list_runs(root: str | Path) -> list[RunSummary]:
    """Every run directly below `root`, newest first; an absent root holds none."""
    root = Path(root)
    names = _run_names(root) if root.is_dir() else []
    summaries = [_summarise(RunFolder(root / name)) for name in names]
    return sorted(summaries, key=lambda run: (-(run.started or 0.0), run.name))


def next_attempt(folder: RunFolder) -> int:
    """1 for a new run, and one more than any attempt that left a trace in manifest.json or metrics.jsonl."""
    from grpo_recipes.runs.manifest import read_manifest
    from grpo_recipes.runs.metrics import last_attempt

    seen = last_attempt(folder.metrics_path)
    if folder.manifest_path.exists():
        attempts = read_manifest(folder).get("attempts", [])
        seen = max([seen, *(int(attempt["attempt"]) for attempt in attempts)])
    return seen + 1


def write_pid(folder: RunFolder, pid: int | None = None) -> None:
    """Record the job's process: its id, host, and start time, since ids are used again after a while."""
    pid = os.getpid() if pid is None else pid
    write_atomically(folder.pid_path, f"{pid} {platform.node()} {_start_time(pid) or '-'}\n")


def process_alive(folder: RunFolder) -> bool | None:
    """Whether the recorded process lives. None where that cannot be known: no record, or one of another host."""
    if not folder.pid_path.is_file():
        return None
    words = folder.pid_path.read_text().split()
    if not words or not words[0].isdigit():
        return None
    pid, host, started = int(words[0]), *[*words[1:3], "-", "-"][:2]
    if host not in ("-", platform.node()):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    now = _start_time(pid)
    return now != "zombie" and (started == "-" or now is None or now == started)


def _start_time(pid: int) -> str | None:
    """Clock ticks since boot at which the process began, "zombie" if it has ended; None without /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.is_file():
        return None
    fields = stat.read_text().rpartition(")")[2].split()  # after the command name, which may hold anything
    return "zombie" if fields[0] in "ZX" else fields[19]


def _run_names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if (p / "manifest.json").is_file() or (p / "recipe.yaml").is_file())


def _summarise(folder: RunFolder) -> RunSummary:
    from grpo_recipes.runs.manifest import read_manifest
    from grpo_recipes.runs.progress import read_progress

    try:
        recipe = read_manifest(folder)["recipe"] if folder.manifest_path.is_file() else {}
        progress = read_progress(folder)
    except UserError:  # one damaged folder must not hide the others
        return RunSummary(folder.name, folder.path, None, None, "damaged", None, None, None, None, None)
    status: str = progress.status if progress else "starting"
    if status in ("running", "starting") and process_alive(folder) is False:
        status = "dead"
    return RunSummary(
        name=folder.name,
        path=folder.path,
        recipe=recipe.get("name"),
        version=recipe.get("version"),
        status=status,
        step=progress.step if progress else None,
        max_steps=progress.max_steps if progress else None,
        reward=progress.reward if progress else None,
        accuracy=progress.accuracy if progress else None,
        started=progress.started_at if progress else None,
    )
