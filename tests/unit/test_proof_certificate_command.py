"""`nemo-run certify layout`: what it takes, and what it refuses before any process starts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.proof.certificate.certify import Plan, make_plan
from grpo_recipes.proof.certificate.command import run
from grpo_recipes.proof.certificate.faults import check_fault
from grpo_recipes.proof.certificate.layouts import Layout
from grpo_recipes.proof.certificate.subject import subject_of


def plan_of(name: str | None = None, *overrides: str, family: str | None = None, layouts=(), **options) -> Plan:
    return make_plan(subject_of(name, overrides, family), layouts, **{"device": "cpu"} | options)


def layouts_of(plan: Plan) -> list[str]:
    return [str(layout) for layout in plan.layouts]


def test_a_recipe_takes_two_processes_and_what_fits() -> None:
    plan = plan_of("tiny_arith")
    assert layouts_of(plan) == ["one", "tp2", "tp2.sp", "pp2", "pp2.vpp2", "dp2", "cp2"]
    assert (plan.processes, plan.device, plan.precision) == (2, "cpu", "float32")
    assert plan.config["model_type"] == "llama"
    assert plan.config["num_hidden_layers"] == 4
    assert plan.subject.name == "tiny_arith@v1"
    assert len(plan.subject.digest) == 64


def test_the_recipes_way_of_computing_is_kept() -> None:
    plan = plan_of("tiny_arith", "policy.megatron_cfg.activation_checkpointing=true")
    assert plan.subject.kept == {"activation_checkpointing": True}


def test_named_layouts_bring_their_processes_and_layers() -> None:
    plan = plan_of(family="llama", layouts=["pp4.vpp2", "tp2"])
    assert layouts_of(plan) == ["one", "pp4.vpp2", "tp2"]
    assert (plan.processes, plan.config["num_hidden_layers"]) == (4, 8)


def test_one_process_is_not_run_twice() -> None:
    assert layouts_of(plan_of(family="llama", layouts=["one", "tp2", "sp.tp2", "tp2"])) == ["one", "tp2", "tp2.sp"]


def test_fewer_processes_than_the_matrix_needs() -> None:
    plan = plan_of(family="qwen3", whole_matrix=True, processes=2)
    assert layouts_of(plan) == ["one", "tp2", "tp2.sp", "pp2", "pp2.vpp2", "dp2", "cp2"]


def test_a_folder_with_nothing_but_a_configuration(tmp_path: Path) -> None:
    from grpo_recipes.recipe.shrink import FAMILIES

    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["mixtral"]))
    plan = plan_of(str(tmp_path))
    assert plan.config["num_local_experts"] == 8
    assert "ep2.dp2" in layouts_of(plan)


@pytest.mark.parametrize(
    ("options", "where", "message"),
    [
        ({}, "certify layout", "give a recipe"),
        ({"name": "tiny_arith", "family": "llama"}, "certify layout", "give a recipe"),
        ({"family": "gpt2"}, "--family", "'gpt2' is not a family"),
        ({"name": "no_such_recipe"}, None, "no_such_recipe"),
        ({"family": "llama", "layouts": ["tp2"], "whole_matrix": True}, "certify layout", "both given"),
        ({"family": "llama", "layouts": ["tp9x"]}, "--layout", "unknown"),
        ({"family": "llama", "layouts": ["tp3"]}, "--layout", "tp3 does not divide 8 query heads"),
        ({"family": "mixtral", "layouts": ["tp2.sp.etp2"]}, "--layout", "tp2.etp2.sp needs GPUs"),
        ({"family": "llama", "layouts": ["dp4"], "processes": 2}, "--processes", "dp4 needs 4 processes"),
        ({"family": "llama", "layouts": ["dp16"]}, "--processes", "16 processes are more than 8"),
        ({"family": "llama", "device": "cuda", "layouts": ["dp8"]}, "--device", "8 processes need as many GPUs"),
    ],
)
def test_what_cannot_be_certified_is_refused(options: dict, where: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan_of(options.pop("name", None), **options)
    assert where is None or caught.value.where == where


def test_a_model_that_is_not_on_this_machine_is_said_clearly() -> None:
    with pytest.raises(UserError, match="neither a folder here") as caught:
        subject_of("tiny_arith", ["policy.model_name=someone/some-model-70b"], None)
    assert caught.value.where == "policy.model_name"
    assert "only config.json is needed" in caught.value.mend
    assert "hf download someone/some-model-70b config.json" in caught.value.mend


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no config.json here"), ("{", "not JSON"), ("[]", "not a JSON object"), ("{}", "models of type 'None'")],
)
def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        plan_of(str(tmp_path))


def test_a_model_that_the_trainer_does_not_cover_is_refused(tmp_path: Path) -> None:
    from grpo_recipes.recipe.shrink import FAMILIES

    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3"] | {"model_type": "gpt2", "architectures": []}))
    with pytest.raises(UserError, match="models of type 'gpt2'"):
        plan_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"] | {"hidden_act": "gelu"}))
    with pytest.raises(UserError, match="hidden_act: activation 'gelu' is not supported"):
        plan_of(str(tmp_path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("activation_checkpointing=perhaps", "activation_checkpointing: should be a valid boolean, is 'perhaps'"),
        ("recompute_granularity=ful", "should be one of full, selective, is 'ful'"),
        ("recompute_modules=[mlp]", "recompute_modules: belongs to recompute_granularity selective"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(subject_of(None, [f"policy.megatron_cfg.{override}"], "llama"), device="cpu")


def test_a_certificate_names_no_setting_that_its_device_did_not_compute_with() -> None:
    from grpo_recipes.proof.certificate.certify import Certificate
    from grpo_recipes.proof.certificate.report import as_json
    from grpo_recipes.proof.certificate.tolerances import FLOAT32

    asked = [
        f"policy.megatron_cfg.{setting}" for setting in ("transformer_impl=local", "activation_checkpointing=true")
    ]
    plan = make_plan(subject_of(None, asked, "llama"), device="cpu")
    assert as_json(Certificate(plan, FLOAT32, ()))["kept_megatron_cfg"] == {"activation_checkpointing": True}
    on_gpus = replace(plan, device="cuda")
    assert on_gpus.kept == {"transformer_impl": "local", "activation_checkpointing": True}


def test_data_parallel_processes_on_a_cpu_belong_to_the_recipes_own_layout() -> None:
    size = "policy.megatron_cfg.tensor_model_parallel_size=2"
    subject = subject_of("tiny_arith", ["cluster.cpu_processes=4", size], None)
    assert str(subject.own) == "tp2.dp2"


def test_a_file_where_the_certificate_should_go_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    options = {"whole_matrix": False, "processes": None, "device": "cpu", "precision": "float32", "plant": None}
    with pytest.raises(UserError, match="is a file") as caught:
        run(None, [], family="llama", layouts=["dp2"], output=file, **options)
    assert caught.value.where == "--output"


def test_an_unknown_fault_is_refused() -> None:
    check_fault(None)
    with pytest.raises(UserError, match="known: swapped_qk_rows, missing_reduction, shifted_boundary, halved_denom"):
        check_fault("typo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--device", "tpu"], "'tpu' is not known"), (["--precision", "float16"], "'float16' is not known")],
)
def test_options_of_the_command(arguments: list[str], message: str) -> None:
    from typer.testing import CliRunner

    from grpo_recipes.cli import app

    result = CliRunner().invoke(app, ["certify", "layout", "--family", "llama", *arguments])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_the_command_passes_everything_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    import grpo_recipes.proof.certificate.command as command
    from grpo_recipes.cli import app

    asked: list = []
    monkeypatch.setattr(command, "run", lambda *args, **options: asked.append((args, options)) or 1)
    options = "--layout tp2 --layout pp2 --device cpu --precision bfloat16 --processes 3 --plant shifted_boundary"
    result = CliRunner().invoke(
        app, ["certify", "layout", "tiny_arith", "grpo.seed=7", *options.split(), "--output", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert asked == [
        (
            ("tiny_arith", ["grpo.seed=7"]),
            {
                "family": None,
                "layouts": ["tp2", "pp2"],
                "whole_matrix": False,
                "processes": 3,
                "device": "cpu",
                "precision": "bfloat16",
                "output": tmp_path,
                "plant": "shifted_boundary",
            },
        )
    ]


def test_what_is_printed_and_returned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path) -> None:
    import grpo_recipes.proof.certificate.command as command
    from grpo_recipes.proof.certificate.certify import Certificate
    from grpo_recipes.proof.certificate.tolerances import FLOAT32
    from grpo_recipes.proof.certificate.verdict import Row

    row = Row("dp2", 2, "packed", None, ("loss differs by 1, allowed 1e-05",), "where it happened")

    def certify(plan: Plan, tell) -> Certificate:
        tell(row)
        return Certificate(plan, FLOAT32, (row,))

    monkeypatch.setattr(command, "certify", certify)
    code = run(
        None,
        [],
        family="llama",
        layouts=["dp2"],
        whole_matrix=False,
        processes=None,
        device="cpu",
        precision="float32",
        output=tmp_path / "certificate",
        plant=None,
    )
    printed = capsys.readouterr()
    assert code == 1
    assert "dp2, packed: loss differs by 1, allowed 1e-05" in printed.out
    assert printed.out.rstrip().endswith("failed: dp2")
    assert "where it happened" in printed.err
    assert (tmp_path / "certificate" / "certificate.json").is_file()


def test_experts_are_certified_in_float32_only():
    with pytest.raises(UserError, match="another expert") as caught:
        make_plan(subject_of(None, (), "qwen3_moe"), precision="bfloat16", device="cpu")
    assert caught.value.where == "--precision"


def test_a_family_takes_settings_that_change_how_it_is_computed_and_no_others():
    subject = subject_of(None, ["policy.megatron_cfg.activation_checkpointing=true"], "qwen3")
    assert subject.kept == {"activation_checkpointing": True}
    with pytest.raises(UserError, match="means nothing") as caught:
        subject_of(None, ["grpo.seed=7"], "qwen3")
    assert caught.value.where == "grpo.seed=7"


def test_on_a_cpu_a_certificate_leaves_out_what_needs_transformer_engine():
    settings = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
    subject = replace(subject_of(None, (), "qwen3_moe"), kept=settings, own=Layout(tp=2, ep=2, etp=2, sp=True))
    plan = make_plan(subject, device="cpu")
    assert plan.kept == {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    assert Layout(tp=2, ep=2, sp=True) in plan.layouts
    assert {layout.etp for layout in plan.layouts} == {1}
    only = replace(subject, kept={"recompute_granularity": "selective", "recompute_modules": ["layernorm"]})
    assert make_plan(only, device="cpu").kept == {}
