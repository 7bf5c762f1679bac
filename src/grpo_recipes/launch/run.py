"""Starts a run's job through NeMo-Run, follows it, and says how it ended."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from grpo_recipes.errors import UserError
from grpo_recipes.launch.follow import clock, follow
from grpo_recipes.launch.job_script import exit_code, job_script, reset
from grpo_recipes.launch.nemo_run_import import import_nemo_run
from grpo_recipes.launch.profile import Profile, load_profile, nemorun_home
from grpo_recipes.launch.stop import StopForwarder
from grpo_recipes.recipe.locate import recipes_folder
from grpo_recipes.runs.folder import RunFolder, create_run, open_run, process_alive
from grpo_recipes.runs.mode import WHOLE, Mode, write_mode

if TYPE_CHECKING:
    from grpo_recipes.recipe.compose import ResolvedRecipe
    from grpo_recipes.runs.progress import Progress

# -P: a file of the folder the user stands in (types.py, datasets/) must not shadow a module.
JOB = (sys.executable, "-P", "-m", "grpo_recipes.job")
INTERRUPTED = 130
ENDED_BY_SIGNAL = 128  # and above: the shell's status of a process that a signal ended
LOG_LINES = 20  # of a failed job


def launch(
    resolved: ResolvedRecipe | None,
    run_dir: str | Path,
    executor: str = "local",
    resume: bool = False,
    dry_run: bool = False,
    job: tuple[str, ...] = JOB,
    mode: Mode = WHOLE,
) -> int:
    """Run a recipe to its end and return an exit status.

    Args:
        resolved: may be None where `resume` is true: the run's own recipe then.
        run_dir: of a new run, or with `resume` of one that exists.
        executor: name or path of a profile (launch/profile.py).
        dry_run: print what would be launched and return.
        job: the command that is given the run folder as its last argument.
        mode: of a new run: whole, or which part.

    Returns:
        0: finished. 130: interrupted, and can be resumed. Else what the job exited with.

    Raises:
        UserError: profile, run folder or NeMo-Run's home unusable, the run still going, or resumed with another recipe.
    """
    profile = load_profile(executor)
    path = Path(run_dir).absolute()
    command = (*job, str(path))
    out = Console(highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        _print_plan(out, resolved, path, executor, profile, command)
        if mode.kind != "whole":
            out.print(f"part of a run: {' '.join(mode.options())}")
        return 0
    _check_home()
    folder = _reopen(path, resolved) if resume else _create(path, resolved, mode)
    out.print(f"run folder: {path}")
    out.print("starting (NeMo-Run takes some seconds to load)")
    try:
        nemo_run = import_nemo_run()
    except KeyboardInterrupt:
        out.print("\ninterrupted before the job was started")
        return INTERRUPTED
    began = time.time()
    with StopForwarder(folder, out) as stop, _started(nemo_run, folder, profile, command) as running:

        def alive() -> bool:
            stop.act()
            return running()

        last = follow(folder, alive, out, since=began)
    return _conclude(folder, stop, last, time.time() - began, out)


def environment(profile: Profile) -> dict[str, str]:
    """What the job's environment has on top of the launcher's: tools of this Python come first on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # Some of reasoning-gym's dependencies warn of their own syntax when they are first compiled.
    return {"PATH": path, "PYTHONWARNINGS": "ignore::SyntaxWarning", **profile.env}


def _check_home() -> None:
    home = nemorun_home()
    try:
        (home / "experiments").mkdir(parents=True, exist_ok=True)
        usable = os.access(home, os.W_OK) and os.access(home / "experiments", os.W_OK)
    except OSError:
        usable = False
    if not usable:
        raise UserError(
            "NeMo-Run cannot keep its files here",
            where=f"NEMORUN_HOME={home}",
            mend="set NEMORUN_HOME to a folder that you may write to",
        )


def _create(path: Path, resolved: ResolvedRecipe | None, mode: Mode) -> RunFolder:
    if resolved is None:
        raise ValueError("a new run needs a recipe")
    folder = create_run(path)
    write_mode(folder, mode)
    folder.recipe_path.write_text(resolved.to_yaml(), encoding="utf-8")
    return folder


def _reopen(path: Path, resolved: ResolvedRecipe | None) -> RunFolder:
    from grpo_recipes.recipe.compose import load_resolved

    folder = open_run(path)
    if process_alive(folder):
        raise UserError("this run is still going", where=str(path), mend="wait for it, or stop it first")
    stored = load_resolved(folder.recipe_path)
    if resolved is not None and resolved.digest != stored.digest:
        from grpo_recipes.recipe.diff import diff

        keys = ", ".join(difference.path for difference in diff(stored, resolved)[:5])
        raise UserError(
            f"the run was started with another recipe; they differ in {keys}",
            where=str(path),
            mend="resume without overrides, or start a new run",
        )
    return folder


@contextmanager
def _started(
    nemo_run: ModuleType, folder: RunFolder, profile: Profile, command: tuple[str, ...]
) -> Iterator[Callable[[], bool]]:
    """The job as a NeMo-Run experiment of its own, started; yields whether it is still going, and waits at the end."""
    from torchx.specs.api import is_terminal

    reset(folder)
    # The id that NeMo-Run makes of the title holds the time in nanoseconds: no two experiments share a folder.
    experiment: Any = nemo_run.Experiment(
        folder.name,
        executor=nemo_run.LocalExecutor(env_vars=environment(profile)),
        log_level="WARNING",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    )

    def running() -> bool:
        states = [task["status"] for task in experiment.status(return_dict=True).values()]
        return not all(is_terminal(state) for state in states)

    with experiment:
        experiment.add(nemo_run.Script(inline=job_script(folder, command)), name="job")
        experiment.run()
        yield running


def _conclude(folder: RunFolder, stop: StopForwarder, last: Progress | None, seconds: float, out: Console) -> int:
    from grpo_recipes.recipe.compose import load_resolved

    code = exit_code(folder)
    if code == 0:
        accuracy = "" if last is None or last.accuracy is None else f", accuracy {last.accuracy:.3f}"
        out.print(f"finished in {clock(seconds)}{accuracy}")
        return 0
    reference = _reference(load_resolved(folder.recipe_path))
    resume = shlex.join(["nemo-run", "recipe", reference, "--resume", str(folder.path)])
    if code == INTERRUPTED or (stop.asked and code > ENDED_BY_SIGNAL):  # else it failed while it was stopping
        step = "" if last is None else f" after step {last.step}"
        out.print(f"interrupted{step}; go on with\n  {resume}")
        return INTERRUPTED
    error = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    error.print(f"the job failed with exit status {code}; the end of {folder.log_path}:")
    lines = folder.log_path.read_text(errors="replace").splitlines() if folder.log_path.is_file() else []
    error.print("\n".join(f"  {line}" for line in lines[-LOG_LINES:]))
    if folder.checkpoints_dir.is_dir() and any(folder.checkpoints_dir.glob("step_*")):
        error.print(f"go on from its last checkpoint with\n  {resume}")
    return code


def _reference(resolved: ResolvedRecipe) -> str:
    """What `nemo-run recipe` is to be told for this recipe."""
    if resolved.version == "unversioned":
        return str(resolved.root / f"{resolved.name}.yaml")
    if resolved.root.parent != recipes_folder():
        return str(resolved.root / f"{resolved.version}.yaml")
    return f"{resolved.name}@{resolved.version}"


def _print_plan(
    out: Console, resolved: ResolvedRecipe | None, path: Path, executor: str, profile: Profile, command: tuple[str, ...]
) -> None:
    from grpo_recipes.recipe.yaml_files import dump

    if resolved is not None:
        out.print(f"recipe: {_reference(resolved)} (digest {resolved.digest[:12]})")
        if resolved.overrides:
            out.print(f"overrides: {' '.join(resolved.overrides)}")
    out.print(f"run folder: {path}")
    out.print(f"resolved recipe: {path / 'recipe.yaml'}")
    out.print(f"command: {shlex.join(command)}")
    out.print("environment:")
    for name, value in environment(profile).items():
        out.print(f"  {name}={value}")
    out.print(f"profile: {executor}")
    out.print("".join(f"  {line}\n" for line in dump(profile.model_dump()).splitlines()), end="")
