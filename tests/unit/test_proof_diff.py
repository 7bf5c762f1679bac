import json
import math
import shutil

import pytest
from synthetic_runs import manifest, write_run

from grpo_recipes.errors import UserError
from grpo_recipes.proof.diff import diff_runs, manifest_differences, metric_differences
from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.metrics import MetricsRow


def row(step, kind="train", **metrics):
    return MetricsRow(1, step, kind, metrics)


def test_a_copy_is_bit_identical_whatever_its_times(tmp_path):
    run = write_run(tmp_path / "a", 0)
    copy = RunFolder(tmp_path / "b")
    shutil.copytree(run.path, copy.path)
    lines = [json.loads(line) for line in copy.metrics_path.read_text().splitlines()]
    for line in lines:
        line["timing"], line["memory"], line["attempt"] = {"total": 99.0}, {}, 2
    copy.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert diff_runs(run.path, copy.path) == [
        "manifest: no difference",
        "metrics: bit-identical in all 166 common rows",
    ]


def test_manifest_differences_name_each_leaf():
    other = manifest(3, policy={"precision": "bfloat16"})
    other["software"]["packages"] = {"torch": "2.12.0", "ray": "2.60.0"}
    other["command"] = ["something", "else"]
    assert manifest_differences(manifest(0), other) == [
        "grpo.seed: 0 -> 3",
        'software.packages.torch: "2.11.0" -> "2.12.0"',
        "seeds.run: 0 -> 3",
        'policy.precision: absent -> "bfloat16"',
        'software.packages.ray: absent -> "2.60.0"',
    ]


def test_the_smallest_change_is_found_at_its_step_largest_metric_first():
    a = [row(1, loss=0.1, reward=0.5), row(2, loss=0.25, reward=0.5), row(3, loss=0.3, reward=0.5)]
    b = [a[0], row(2, loss=0.25 + 2**-54, reward=0.25), row(3, loss=0.4, reward=0.5)]
    assert metric_differences(a, b) == [
        "metrics: 2 of 3 common rows differ, the first is step 2 (train):",
        "  reward: 0.5 -> 0.25 (relative 0.5)",
        "  loss: 0.25 -> 0.25000000000000006 (relative 2.2e-16)",
    ]


def test_nan_equals_nan_and_signed_zeros_differ():
    assert metric_differences([row(1, x=math.nan)], [row(1, x=math.nan)]) == [
        "metrics: bit-identical in all 1 common rows"
    ]
    assert metric_differences([row(1, x=0.0)], [row(1, x=-0.0)])[1] == "  x: 0.0 -> -0.0 (relative 0)"
    assert metric_differences([row(1, x=0.0)], [row(1, x=math.nan)])[1] == "  x: 0.0 -> nan (relative inf)"


def test_rows_and_metrics_of_one_side_only():
    assert metric_differences([row(1, x=1.0), row(2, x=1.0)], [row(1, x=1.0, y=2.0), row(1, "val", z=1.0)]) == [
        "metrics: 1 rows only in the first run, the first is step 2 (train)",
        "metrics: 1 rows only in the second run, the first is step 1 (val)",
        "metrics: 1 of 1 common rows differ, the first is step 1 (train):",
        "  y: None -> 2.0 (relative inf)",
    ]
    assert metric_differences([row(1)], [])[-1] == "metrics: no row in common"


def test_a_missing_run_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such run"):
        diff_runs(tmp_path / "a", tmp_path / "b")
