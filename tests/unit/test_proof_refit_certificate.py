"""`nemo-run certify refit`: what it plans, what it refuses before any process starts, and what it prints."""

from __future__ import annotations

import json

import pytest

from grpo_recipes.engine.refit import RefitStats
from grpo_recipes.errors import UserError
from grpo_recipes.proof.certificate.subject import subject_of
from grpo_recipes.proof.refit_certificate import certify, command
from grpo_recipes.proof.refit_certificate.certify import RefitCertificate, Row, make_refit_plan
from grpo_recipes.proof.refit_certificate.worker import twins

STATS = RefitStats(2_000_000, 0.5, 21, True, 3e-6, 0.1, ("a", "b"))


@pytest.fixture(autouse=True)
def no_vllm_is_needed(monkeypatch):
    monkeypatch.setattr("grpo_recipes.generation.vllm.arguments.check_vllm", lambda config, *, on_gpu: None)


def plan_of(family="llama", **options):
    return make_refit_plan(subject_of(None, [], family), device="cpu", **options)


def test_a_family_runs_on_one_process_with_heads_that_vllm_takes():
    plan = plan_of()
    assert str(plan.layout) == "one" and plan.plan.config["head_dim"] == 32
    assert plan.plan.config["num_hidden_layers"] == 4 and plan.transport == "ipc"


def test_a_layout_is_the_named_one_or_the_recipes_own():
    assert str(plan_of(layout="tp2.pp2").layout) == "tp2.pp2"
    own = subject_of(
        "tiny_arith", ["policy.megatron_cfg.tensor_model_parallel_size=2", "cluster.cpu_processes=2"], None
    )
    assert str(make_refit_plan(own, device="cpu").layout) == "tp2"


@pytest.mark.parametrize(
    ("options", "words"),
    [({"plant": "gremlin"}, "'gremlin' is not a fault"), ({"layout": "ep2"}, "no experts"), ({"layout": "x"}, "x")],
)
def test_what_cannot_be_put_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        plan_of(**options)


def test_the_two_tensors_that_change_places_are_of_one_shape():
    class Spec:
        def __init__(self, name, shape, bucket=0):
            self.name, self.shape, self.dtype, self.bucket = name, shape, "float32", bucket

    norms = [Spec("norm", (4,)), Spec("norm2", (4,))]
    assert twins([*norms, Spec("a", (2, 3)), Spec("b", (3, 2)), Spec("c", (2, 3), 1), Spec("d", (2, 3), 1)]) == (
        "c",
        "d",
    )


@pytest.mark.parametrize(
    ("rows", "status", "shown"),
    [
        ((Row(1, 21, STATS), Row(2, 21, STATS)), 0, "3.0e-06"),
        ((Row(1, 21, STATS), Row(2, 21, None, "lm_head.weight differs")), 1, "refit 2: lm_head.weight differs"),
        ((Row(1, 21, None, "no"),), 1, "FAILED"),
        ((Row(1, 21, STATS),), 1, "0.004"),  # one refit alone proves nothing of the second
    ],
)
def test_the_exit_status_and_the_file(monkeypatch, capsys, tmp_path, rows, status, shown):
    monkeypatch.setattr(command, "certify_refit", lambda plan, tell: RefitCertificate(plan, rows))
    found = command.run(
        None,
        [],
        family="llama",
        layout=None,
        transport="ipc",
        device="cpu",
        precision="float32",
        output=tmp_path,
        plant=None,
    )
    assert found == status and shown in capsys.readouterr().out
    content = json.loads((tmp_path / certify.FILE).read_text())
    assert content["passed"] is (status == 0) and len(content["rows"]) == len(rows)
    assert content["probe"] == {"mean": 1e-5, "largest": 1e-4}
