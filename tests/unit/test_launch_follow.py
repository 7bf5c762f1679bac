from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from grpo_recipes.launch import follow as follow_module
from grpo_recipes.launch.follow import Pace, PlainDisplay, clock, describe, follow
from grpo_recipes.runs.folder import RunFolder, create_run
from grpo_recipes.runs.progress import Progress, write_progress

RUNNING = Progress(
    attempt=1,
    step=12,
    max_steps=150,
    phase="generation",
    reward=0.53,
    accuracy=0.714,
    tokens_per_second=1234.4,
    started_at=1000.0,
    updated_at=1030.0,
    status="running",
)


def test_one_line_says_it_all() -> None:
    assert describe(RUNNING, 125.0) == "12/150  reward 0.530  accuracy 0.714  1,234 tok/s  generation  2:05 left"


def test_what_is_not_known_yet_is_left_out() -> None:
    start = replace(RUNNING, step=0, reward=None, accuracy=None, tokens_per_second=None, phase="setup")
    assert describe(start, None) == "0/150  setup"
    assert describe(replace(start, max_steps=0), None) == "setup"


def test_an_ended_run_shows_its_status_in_place_of_phase_and_time() -> None:
    ended = replace(RUNNING, step=150, reward=None, accuracy=None, tokens_per_second=None, status="finished")
    assert describe(ended, 0.0) == "150/150  finished"


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (125, "2:05"), (3725, "1:02:05"), (59.7, "1:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_time_left_is_the_mean_pace_after_the_first_step_of_this_attempt() -> None:
    pace = Pace()
    assert pace.left(replace(RUNNING, step=0, updated_at=100.0)) is None
    assert pace.left(replace(RUNNING, step=1, updated_at=160.0)) is None  # set-up and warming up
    assert pace.left(replace(RUNNING, step=3, updated_at=166.0)) == pytest.approx(3.0 * 147)
    # A resumed run starts at a later step: its steps before count for nothing.
    assert pace.left(replace(RUNNING, attempt=2, step=0, updated_at=480.0)) is None
    assert pace.left(replace(RUNNING, attempt=2, step=100, updated_at=490.0)) is None
    assert pace.left(replace(RUNNING, attempt=2, step=101, updated_at=492.0)) == pytest.approx(2.0 * 49)


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200), out


def test_plain_lines_come_with_evaluations_and_every_few_seconds() -> None:
    console, out = plain()
    display = PlainDisplay(console)
    for step, (second, accuracy) in enumerate(
        [(0, None), (2, None), (4, 0.5), (6, 0.5), (8, 0.5), (15, 0.5), (16, 0.5)]
    ):
        display.show(replace(RUNNING, step=step, updated_at=1000.0 + second, accuracy=accuracy), None)
    display.show(replace(RUNNING, step=7, updated_at=1017.0, accuracy=0.5, status="finished"), None)
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == ["0", "2", "5", "7"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(follow_module, "POLL_SECONDS", 0.0)
    return create_run(tmp_path / "run")


def test_the_last_words_of_a_job_are_read_after_its_end(folder: RunFolder) -> None:
    console, out = plain()
    finished = replace(RUNNING, step=150, status="finished", updated_at=2000.0)

    def alive() -> bool:  # ends, and writes just before
        write_progress(folder, finished)
        return False

    assert follow(folder, alive, console, since=1000.0) == finished
    assert out.getvalue().splitlines()[-1].endswith("finished")


def test_what_an_earlier_attempt_said_is_left_out(folder: RunFolder) -> None:
    console, out = plain()
    write_progress(folder, replace(RUNNING, status="interrupted", updated_at=900.0))
    assert follow(folder, lambda: False, console, since=1000.0) is None
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar(folder: RunFolder) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    write_progress(folder, RUNNING)
    answers = iter([True, False])
    assert follow(folder, lambda: next(answers), console, since=1000.0) == RUNNING
    assert "12/150  reward 0.530" in out.getvalue()
    assert "━" in out.getvalue()
