"""What a certificate lets pass: differences, tolerances, and a report that hides nothing."""

import json
import math

import pytest
import torch

from grpo_recipes.proof.certificate.certify import Certificate, make_plan
from grpo_recipes.proof.certificate.report import as_json, reasons, table, write_certificate
from grpo_recipes.proof.certificate.subject import subject_of
from grpo_recipes.proof.certificate.tolerances import FLOAT32
from grpo_recipes.proof.certificate.verdict import Measured, Row, failures, of_all_ranks
from grpo_recipes.proof.certificate.worker import differences_of_gradients, differences_of_weights


def measured(**changes) -> Measured:
    values = {
        "loss": 1e-7,
        "logprob": 1e-6,
        "entropy": 1e-7,
        "grad_norm": 1e-7,
        "counts": 0.0,
        "loaded": {"a": 0.0, "b": 0.0},
        "gradients": {"a": 1e-6, "b": 2e-6},
        "weights": {"a": 1e-5, "b": 1e-6},
        "seconds": 1.0,
    }
    return Measured(**values | changes)


def test_within_the_tolerances() -> None:
    assert list(failures(measured(), FLOAT32)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": 1e-3}, "loss differs by 0.001, allowed 1e-05"),
        ({"loss": math.inf}, "loss differs by inf"),
        ({"logprob": 1e-2}, "logprob differs by 0.01"),
        ({"entropy": 1e-2}, "entropy differs by 0.01"),
        ({"grad_norm": 1e-2}, "grad norm differs by 0.01"),
        ({"counts": 1.0}, "the counts of tokens or of clipped tokens differ by 1"),
        ({"loaded": {"a": 0.0, "b": 1e-9}}, "weight as loaded: b differs by 1e-09, allowed 0"),
        ({"gradients": {"a": 1e-6, "b": 0.5}}, "gradient: b differs by 0.5, allowed 0.0001"),
        ({"weights": {"a": math.inf, "b": 0.0}}, "weight after three steps: a differs by inf, allowed 0.001"),
    ],
)
def test_each_measure_can_fail(changes: dict, message: str) -> None:
    (found,) = failures(measured(**changes), FLOAT32)
    assert found.startswith(message)


def test_the_three_worst_tensors_are_named() -> None:
    gradients = {"a": 0.1, "b": 0.4, "c": 0.2, "d": 0.3, "e": 0.0}
    assert list(failures(measured(gradients=gradients), FLOAT32)) == [
        "gradient: b differs by 0.4, allowed 0.0001",
        "gradient: d differs by 0.3, allowed 0.0001",
        "gradient: c differs by 0.2, allowed 0.0001",
        "gradient: 1 more tensors differ",
    ]


def test_the_worst_rank_counts() -> None:
    one, two = measured(loss=1e-3), measured(gradients={"a": 0.5, "b": 0.0}, seconds=3.0)
    both = of_all_ranks([one, two])
    assert (both.loss, both.gradients, both.seconds) == (1e-3, {"a": 0.5, "b": 2e-6}, 3.0)
    assert of_all_ranks([one, measured(gradients={"a": 0.0})]).gradients == {"a": 1e-6, "b": math.inf}


def test_gradients_relative_to_their_tensor_and_never_to_next_to_nothing() -> None:
    exact = {"a": torch.tensor([4.0, -8.0]), "tiny": torch.tensor([1e-9, 0.0]), "none": torch.zeros(2)}
    found = {"a": torch.tensor([4.0, -7.2]), "tiny": torch.tensor([9e-9, 0.0]), "none": torch.tensor([0.0, 8e-3])}
    differences = differences_of_gradients(found, exact, small=1e-3)
    assert differences["a"] == pytest.approx(0.1)
    assert differences["tiny"] == pytest.approx(1e-6)
    assert differences["none"] == pytest.approx(1.0)


def test_missing_misshapen_and_infinite_tensors_are_infinitely_wrong() -> None:
    exact = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(2)}
    found = {"b": torch.ones(3), "c": torch.tensor([1.0, math.nan]), "d": torch.ones(2), "e": torch.ones(2)}
    for differences in (
        differences_of_gradients(found, exact, small=1e-3),
        differences_of_weights(found, exact, 0.0, None),
    ):
        assert differences == {"a": math.inf, "b": math.inf, "c": math.inf, "d": 0.0, "e": math.inf}


def test_weights_relative_to_their_change_beyond_rounding() -> None:
    exact, found = {"a": torch.tensor([2.0, 1.0])}, {"a": torch.tensor([2.25, 1.0])}
    assert differences_of_weights(found, exact, 0.0, {"a": 0.5})["a"] == pytest.approx(0.5)
    assert differences_of_weights(found, exact, 0.1, {"a": 0.5})["a"] == pytest.approx(0.1)
    assert differences_of_weights(found, exact, 0.2, {"a": 0.5})["a"] == 0.0


def certificate() -> Certificate:
    plan = make_plan(subject_of(None, [], "llama"), ["dp2"], device="cpu")
    broken = measured(gradients={"a": math.inf, "b": 0.0})
    rows = (
        Row("one", 1, "packed", measured(), ()),
        Row("dp2", 2, "packed", broken, tuple(failures(broken, FLOAT32))),
        Row("dp2", 2, "unpacked", None, ("WorkerDied: rank 1 was killed",), "a traceback"),
    )
    return Certificate(plan, FLOAT32, rows)


def test_the_file_holds_every_tensor_and_the_verdict(tmp_path) -> None:
    found = json.loads(write_certificate(certificate(), tmp_path / "out").read_text())
    assert found["passed"] is False
    assert [row["passed"] for row in found["rows"]] == [True, False, False]
    assert found["rows"][0]["measured"]["gradients"] == {"a": 1e-6, "b": 2e-6}
    assert found["rows"][1]["measured"]["gradients"] == {"a": "inf", "b": 0.0}
    assert found["rows"][2]["measured"] == {} and found["rows"][2]["details"] == "a traceback"
    assert found["tolerances"]["gradient"] == 1e-4 and found["tolerances"]["reason"]
    assert found["config"]["model_type"] == "llama"
    assert "torch" in found["software"]["packages"]


def test_the_table_has_a_row_for_each_and_one_for_what_is_allowed() -> None:
    assert table(certificate()).row_count == 4
    assert list(reasons(certificate())) == [
        "dp2, packed: gradient: a differs by inf, allowed 0.0001",
        "dp2, unpacked: WorkerDied: rank 1 was killed",
    ]
    assert certificate().exit_code == 1
    assert Certificate(certificate().plan, FLOAT32, certificate().rows[:1]).exit_code == 0


def test_json_is_plain() -> None:
    json.dumps(as_json(certificate()), allow_nan=False)
