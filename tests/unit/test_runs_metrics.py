import json
import math
import struct

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.runs.folder import create_run
from grpo_recipes.runs.metrics import MetricsLog, last_attempt, read_metrics, series


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path / "run")


def train(log, *steps):
    for step in steps:
        log.append(step, "train", {"train/reward": step + log._attempt / 10})


def seen(run):
    return [(row.kind, row.step, row.attempt) for row in read_metrics(run.metrics_path)]


def test_absent_file_has_no_rows(run):
    assert read_metrics(run.metrics_path) == []
    assert last_attempt(run.metrics_path) == 0


def test_floats_come_back_bit_for_bit(run):
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2.0**-149, 1e16 + 2.0, float("inf"), float("-inf")]
    log = MetricsLog(run, 1)
    log.append(
        1, "train", {str(i): value for i, value in enumerate(values)}, {"total": 0.1}, {"peak_generation": 2**40}
    )
    row = read_metrics(run.metrics_path)[0]
    assert [struct.pack("d", v) for v in row.metrics.values()] == [struct.pack("d", v) for v in values]
    assert row.timing == {"total": 0.1}
    assert row.memory == {"peak_generation": 2**40}


def test_nan_is_valid_json_and_comes_back(run):
    MetricsLog(run, 1).append(1, "train", {"train/loss": math.nan})
    line = json.loads(run.metrics_path.read_text(), parse_constant=pytest.fail)
    assert line["metrics"] == {"train/loss": "nan"}
    assert math.isnan(read_metrics(run.metrics_path)[0].metrics["train/loss"])


def test_a_row_can_be_read_before_the_log_is_closed(run):
    log = MetricsLog(run, 1)
    train(log, 1)
    assert seen(run) == [("train", 1, 1)]


def test_rows_sort_by_step_and_training_comes_before_evaluation(run):
    log = MetricsLog(run, 1)
    log.append(0, "val", {"val/accuracy": 0.4})
    train(log, 1, 2)
    log.append(2, "val", {"val/accuracy": 0.5})
    assert seen(run) == [("val", 0, 1), ("train", 1, 1), ("train", 2, 1), ("val", 2, 1)]
    assert series(read_metrics(run.metrics_path), "val/accuracy") == [(0, 0.4), (2, 0.5)]


def test_the_last_attempt_of_a_step_wins_and_what_it_has_not_reached_is_dropped(run):
    train(MetricsLog(run, 1), 1, 2, 3, 4, 5, 6, 7, 8)
    second = MetricsLog(run, 2, resumed_from=5)
    assert seen(run) == [("train", s, 1) for s in (1, 2, 3, 4, 5)]
    train(second, 6)
    assert seen(run) == [("train", s, 1) for s in (1, 2, 3, 4, 5)] + [("train", 6, 2)]
    third = MetricsLog(run, 3, resumed_from=2)
    train(third, 3)
    assert seen(run) == [("train", 1, 1), ("train", 2, 1), ("train", 3, 3)]
    assert last_attempt(run.metrics_path) == 3


def test_without_a_resume_line_the_first_row_tells_where_an_attempt_began(run):
    first = MetricsLog(run, 1)
    for step in (1, 2, 3, 4):
        train(first, step)
        first.append(step, "val", {"val/accuracy": 0.1})
    train(MetricsLog(run, 2), 3)
    # evaluation 3 and 4 of attempt 1 speak of weights that no longer exist
    assert seen(run) == [
        ("train", 1, 1), ("val", 1, 1), ("train", 2, 1), ("val", 2, 1), ("train", 3, 2),
    ]  # fmt: skip


def test_an_attempt_that_only_evaluates_keeps_the_training_row_of_its_step(run):
    first = MetricsLog(run, 1)
    train(first, 1, 2)
    MetricsLog(run, 2).append(2, "val", {"val/accuracy": 0.1})
    assert seen(run) == [("train", 1, 1), ("train", 2, 1), ("val", 2, 2)]


def test_a_torn_last_line_is_ignored_at_every_byte(run):
    log = MetricsLog(run, 1)
    train(log, 1, 2)
    whole = run.metrics_path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole) - 1):
        run.metrics_path.write_bytes(whole[:cut])
        assert seen(run) == [("train", 1, 1)], cut
    run.metrics_path.write_bytes(whole[:-1])  # only the newline is missing: the row is there
    assert seen(run) == [("train", 1, 1), ("train", 2, 1)]


def test_the_next_attempt_starts_on_a_line_of_its_own(run):
    train(MetricsLog(run, 1), 1, 2)
    whole = run.metrics_path.read_bytes()
    for cut, kept in ((5, [("train", 1, 1)]), (1, [("train", 1, 1), ("train", 2, 1)])):
        run.metrics_path.write_bytes(whole[:-cut])
        train(MetricsLog(run, 2, resumed_from=len(kept)), len(kept) + 1)
        assert seen(run) == [*kept, ("train", len(kept) + 1, 2)]
        assert run.metrics_path.read_bytes().count(b"\n") == len(kept) + 2


@pytest.mark.parametrize("bad", ['{"attempt":1,"ste', "[]", '{"attempt":1,"step":1,"kind":"test"}', "\x00\x00"])
def test_a_damaged_line_elsewhere_names_its_number(run, bad):
    train(MetricsLog(run, 1), 1, 2)
    lines = run.metrics_path.read_text().splitlines()
    run.metrics_path.write_text("\n".join([lines[0], bad, lines[1]]) + "\n")
    with pytest.raises(UserError, match="line 2"):
        read_metrics(run.metrics_path)
