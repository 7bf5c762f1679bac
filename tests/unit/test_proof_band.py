import json
import shutil

import pytest
from synthetic_runs import EVALUATED, write_run

from grpo_recipes.errors import UserError
from grpo_recipes.proof.band import find_band, main, make_band, read_band, write_band
from grpo_recipes.runs.folder import RunFolder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / f"seed-{seed}", seed) for seed in range(3)]


def change(run: RunFolder, to, edit) -> RunFolder:
    """A copy of a run with another manifest."""
    copy = RunFolder(to)
    shutil.copytree(run.path, copy.path)
    manifest = json.loads(copy.manifest_path.read_text())
    edit(manifest)
    copy.manifest_path.write_text(json.dumps(manifest))
    return copy


def test_band_round_trips_and_names_what_it_is(runs, tmp_path):
    path = tmp_path / "tiny_arith" / "reference.json"
    main([str(path), *(str(run.path) for run in runs)])
    band = read_band(path)
    assert (band.recipe, band.version, band.seeds) == ("tiny_arith", "v1", (0, 1, 2))
    assert len(band.digests) == 3
    assert len(band.hardware) == 1
    assert band.hardware[0]["cpu"] == "A CPU"
    assert [run["name"] for run in band.runs] == ["seed-0", "seed-1", "seed-2"]
    accuracy = band.curves["val/accuracy"]
    assert accuracy.steps == EVALUATED
    assert len(accuracy.values) == 3
    made = make_band([run.path for run in runs])
    assert accuracy.values[1] == pytest.approx(made.curves["val/accuracy"].values[1], rel=1e-5)
    first = [row[0] for row in accuracy.values]
    assert (accuracy.low[0], accuracy.high[0]) == (min(first), max(first))
    assert accuracy.mean[0] == pytest.approx(sum(first) / 3)
    write_band(tmp_path / "again.json", band)
    assert read_band(tmp_path / "again.json") == band
    assert find_band("tiny_arith", tmp_path) == path
    assert find_band("other", tmp_path) is None


def test_the_file_holds_one_line_per_metric_and_no_path_of_the_machine(runs, tmp_path):
    path = tmp_path / "reference.json"
    write_band(path, make_band([run.path for run in runs]))
    text = path.read_text()
    assert str(tmp_path) not in text
    assert str(runs[0].path.parent) not in text
    assert sum(line.strip().startswith('"val/accuracy"') for line in text.splitlines()) == 1


def test_runs_that_differ_in_more_than_the_seed_make_no_band(runs, tmp_path):
    def bad(name, edit):
        return [runs[0].path, change(runs[1], tmp_path / name, edit).path]

    def set_period(manifest):
        manifest["recipe"]["full"]["grpo"]["val_period"] = 5

    with pytest.raises(UserError, match="val_period: 10 in the reference, 5 here"):
        make_band(bad("a", set_period))
    with pytest.raises(UserError, match="another recipe version"):
        make_band(bad("b", lambda m: m["recipe"].update(version="v2")))
    with pytest.raises(UserError, match="inputs"):
        make_band(bad("c", lambda m: m["inputs"].update(train_rows="zz")))
    with pytest.raises(UserError, match="seeds repeat"):
        make_band([runs[0].path, runs[0].path])
    with pytest.raises(UserError, match="two runs"):
        make_band([runs[0].path])


def test_an_unfinished_run_makes_no_band(runs, tmp_path):
    unfinished = write_run(tmp_path / "u", 7, last=100)
    with pytest.raises(UserError, match="step 101 of 150"):
        make_band([runs[0].path, unfinished.path])


def test_a_run_evaluated_at_other_steps_makes_no_band(runs, tmp_path):
    other = change(runs[1], tmp_path / "o", lambda manifest: None)
    lines = other.metrics_path.read_text().splitlines(keepends=True)
    other.metrics_path.write_text("".join(x for x in lines if '"step":20,"kind":"val"' not in x))
    with pytest.raises(UserError, match="at other steps"):
        make_band([runs[0].path, other.path])


def test_a_step_without_a_loss_leaves_a_gap_in_that_curve_only(runs, tmp_path):
    # Covers: every group of a step was dropped
    other = change(runs[1], tmp_path / "o", lambda manifest: None)
    lines = [json.loads(line) for line in other.metrics_path.read_text().splitlines()]
    for line in lines:
        if (line["step"], line["kind"]) == (7, "train"):
            del line["metrics"]["train/loss"]
    other.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = make_band([runs[0].path, other.path]).curves
    assert 7 not in curves["train/loss"].steps
    assert len(curves["train/loss"].steps) == 149
    assert len(curves["train/reward"].steps) == 150


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": 99}', '{"schema_version": 1, "recipe": {}}'])
def test_a_damaged_reference_is_a_user_error(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match=r"r\.json"):
        read_band(tmp_path / "r.json")


def test_the_command_ends_with_the_message(tmp_path):
    with pytest.raises(SystemExit, match="no such run folder"):
        main([str(tmp_path / "out.json"), str(tmp_path / "a"), str(tmp_path / "b")])
