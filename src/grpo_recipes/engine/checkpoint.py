"""Checkpoints of a run: written aside and renamed, checked before they are trusted, pruned to the best and the last."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.runs.files import file_sha256

STATE, FILES, POLICY = "state.json", "files.json", "policy"
READERS = 8  # files whose digests are computed at the same time


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    state: dict[str, Any]  # the engine's loop state, as JSON
    metric: float | None  # the held-out metric at this step, if it was evaluated

    @property
    def policy_folder(self) -> Path:
        return self.path / POLICY


@dataclass(frozen=True)
class CheckpointStore:
    """keep_last: newest checkpoints kept. keep_top_k: best by metric kept besides."""

    folder: Path
    keep_last: int
    keep_top_k: int
    higher_is_better: bool

    def save(
        self, step: int, state: dict[str, Any], metric: float | None, write_policy: Callable[[Path], Mapping[str, str]]
    ) -> Path:
        """Write the checkpoint of `step`, then remove those no longer kept.

        Args:
            write_policy: writes into the folder it is given; returns the sha256 of each file by name.

        Raises:
            UserError: the disk is full or refuses; earlier checkpoints are untouched.
        """
        with self.writing(step):
            digests = write_policy(self.open(step))
        return self.seal(step, state, metric, digests)

    def open(self, step: int) -> Path:
        """The folder, aside, that the policy is to be written to. Only one checkpoint is written at a time."""
        for leftover in (*self.folder.glob(".writing_*"), *self.folder.glob(".removing_*")):
            shutil.rmtree(leftover)
        folder = self._aside(step) / POLICY
        folder.mkdir(parents=True)
        return folder

    def seal(self, step: int, state: dict[str, Any], metric: float | None, digests: Mapping[str, str]) -> Path:
        """Make a checkpoint of what was written to the folder of `open`: until its last rename there is none.

        Raises:
            UserError: the disk is full or refuses, or a file of another machine cannot be seen here.
        """
        aside, final = self._aside(step), self.folder / f"step_{step:06d}"
        unseen = digests.keys() - set(relative_files(aside / POLICY))
        if unseen:
            raise UserError(
                f"{min(unseen)} of the checkpoint of step {step} was written by a process whose files are not seen here",
                where=str(self.folder),
                mend="put the run folder on a file system that all nodes share",
            )
        with self.writing(step):
            write_json(aside / STATE, {"step": step, "state": state, "metric": metric})
            listing = {f"{POLICY}/{name}": digest for name, digest in digests.items()}
            write_json(aside / FILES, {STATE: file_sha256(aside / STATE), **listing})
            for name in relative_files(aside):
                sync(aside / name)
            if final.exists():  # damaged, or from an attempt that this run does not continue
                self._hide(final)
            aside.rename(final)
            sync(self.folder)
        self._prune()
        return final

    @contextmanager
    def writing(self, step: int) -> Iterator[None]:
        """An OSError within becomes one clear UserError, and what was written of the checkpoint is removed."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(self._aside(step), ignore_errors=True)
            kept = [path.name for path in self._all()]
            raise UserError(
                f"could not write the checkpoint of step {step} ({error}); intact: {', '.join(kept) or 'none'}",
                where=str(self.folder),
                mend="free disk space, then continue the run with --resume",
            ) from error

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest undamaged checkpoint; says through `warn` which damaged ones were passed over and put aside.

        Raises:
            UserError: there are checkpoints, but every one is damaged.
        """
        damaged: list[Path] = []
        for path in reversed(self._all()):
            problem = find_damage(path)
            if problem is None:
                for passed_over in damaged:  # they must not count among the last that are kept
                    aside = passed_over.with_name(f"damaged_{passed_over.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    passed_over.rename(aside)
                return read_checkpoint(path)
            damaged.append(path)
            warn(f"checkpoint {path.name} is damaged ({problem}); falling back to the one before it")
        if damaged:
            raise UserError(
                f"every checkpoint is damaged: {', '.join(path.name for path in damaged)}",
                where=str(self.folder),
                mend="restore one from a backup, or start the recipe again in a new run folder",
            )
        return None

    def _aside(self, step: int) -> Path:
        return self.folder / f".writing_step_{step:06d}"

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("step_*"))

    def _prune(self) -> None:
        found = self._all()
        keep = set(found[-self.keep_last :])
        scored = [(read_checkpoint(path).metric, path) for path in found]
        ranked = sorted(
            ((metric if self.higher_is_better else -metric, path) for metric, path in scored if metric is not None),
            reverse=True,
        )
        keep |= {path for _, path in ranked[: self.keep_top_k]}
        for path in set(found) - keep:
            self._hide(path)
        for hidden in self.folder.glob(".removing_*"):
            shutil.rmtree(hidden)

    def _hide(self, path: Path) -> None:
        """Renamed before it is removed: a process killed in between leaves nothing that looks like a checkpoint."""
        path.rename(self.folder / f".removing_{path.name}")


def read_checkpoint(path: Path) -> Checkpoint:
    content = json.loads((path / STATE).read_text())
    return Checkpoint(path, content["step"], content["state"], content["metric"])


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None: every recorded file is there with its recorded digest."""
    listing = path / FILES
    if not listing.is_file():
        return f"{FILES} is missing"
    try:
        recorded = json.loads(listing.read_text())
    except ValueError:
        return f"{FILES} is not JSON"
    missing = [name for name in recorded if not (path / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: file_sha256(path / name), recorded)
        changed = [name for name, digest in zip(recorded, found, strict=True) if digest != recorded[name]]
    return f"{changed[0]} has changed" if changed else None


def relative_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True))


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
