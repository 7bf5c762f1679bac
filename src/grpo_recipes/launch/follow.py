"""Shows how a run goes on, from its folder alone: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar

from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.progress import Progress, read_progress

POLL_SECONDS = 0.5
PLAIN_LINE_SECONDS = 10.0  # between lines where nothing was evaluated


class Display(Protocol):
    def show(self, progress: Progress, left: float | None) -> None:
        """left: seconds to the end, None while that cannot be told."""


class Pace:
    """Seconds to the end, at the mean pace of the steps seen so far; set-up and the first step do not count."""

    def __init__(self) -> None:
        self._start: Progress | None = None  # the first word of this attempt
        self._first: Progress | None = None  # its first finished step

    def left(self, progress: Progress) -> float | None:
        if self._start is None or progress.attempt != self._start.attempt or progress.step < self._start.step:
            self._start, self._first = progress, None
        if self._first is None:
            self._first = progress if progress.step > self._start.step else None
            return None
        steps = progress.step - self._first.step
        if not steps:
            return None
        return (progress.updated_at - self._first.updated_at) / steps * (progress.max_steps - progress.step)


def follow(folder: RunFolder, alive: Callable[[], bool], console: Console, since: float) -> Progress | None:
    """Show progress until `alive` says no, and return the last of it.

    Args:
        alive: asked about twice a second.
        since: seconds since the epoch; what the run said before then is of an earlier attempt and left out.
    """
    if console.is_terminal:
        with Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}"),
            console=console,
            refresh_per_second=4,
        ) as bar:
            return _watch(folder, alive, TerminalDisplay(bar, folder.name), since)
    return _watch(folder, alive, PlainDisplay(console), since)


def _watch(folder: RunFolder, alive: Callable[[], bool], display: Display, since: float) -> Progress | None:
    pace, seen = Pace(), None
    while True:
        running = alive()  # asked first: what the run wrote last is read once more after its end
        progress = read_progress(folder)
        if progress is not None and progress.updated_at >= since and progress != seen:
            seen = progress
            display.show(progress, pace.left(progress))
        if not running:
            return seen
        time.sleep(POLL_SECONDS)


class TerminalDisplay:
    def __init__(self, bar: Bar, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=None, state="starting")

    def show(self, progress: Progress, left: float | None) -> None:
        state = describe(progress, left)
        self._bar.update(self._task, completed=progress.step, total=progress.max_steps, state=state)


class PlainDisplay:
    """A line for each evaluation, each change of status, and otherwise every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: Progress | None = None

    def show(self, progress: Progress, left: float | None) -> None:
        last = self._last
        news = last is None or (progress.accuracy, progress.status) != (last.accuracy, last.status)
        if last is None or news or progress.updated_at - last.updated_at >= PLAIN_LINE_SECONDS:
            self._last = progress
            self._console.print(describe(progress, left), markup=False, highlight=False, soft_wrap=True)


def describe(progress: Progress, left: float | None) -> str:
    """One line, for example "12/150  reward 0.53  accuracy 0.71  1,234 tok/s  generation  2:05 left"."""
    parts = [f"{progress.step}/{progress.max_steps}"] if progress.max_steps else []
    if progress.reward is not None:
        parts.append(f"reward {progress.reward:.3f}")
    if progress.accuracy is not None:
        parts.append(f"accuracy {progress.accuracy:.3f}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:,.0f} tok/s")
    parts.append(progress.phase if progress.status == "running" else progress.status)
    if left is not None and progress.status == "running":
        parts.append(f"{clock(left)} left")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """125 -> "2:05", 3725 -> "1:02:05"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
