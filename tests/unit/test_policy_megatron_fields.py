"""Every field of Megatron-Core's configuration classes, from a recipe to the object that Megatron holds."""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.families import family_of
from grpo_recipes.policy.hf.folder import read_config
from grpo_recipes.policy.megatron import trainer  # before the others: it makes Megatron-Core run on a CPU
from grpo_recipes.policy.megatron.config import transformer_config
from grpo_recipes.policy.megatron.optimizer import ddp_config, optimizer_config
from grpo_recipes.recipe.megatron import (
    SCHEDULER_ARGUMENTS,
    default_of,
    fields,
    megatron_problems,
)
from grpo_recipes.recipe.megatron_combinations import needs, setting_problems
from grpo_recipes.recipe.megatron_limits import DERIVED, FIXED, INERT, NEEDS, REFUSED
from grpo_recipes.recipe.schema import MegatronConfig, PolicyConfig
from policy_models import policy_config, policy_gradient_loss, random_batch, write_model

CHECK_HARDWARE = "grpo_recipes.policy.megatron.config._check_hardware"
CLASSES = ("TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig")

# Values that a rule by type does not find, and what has to be set with them.
CHOSEN: dict[str, dict[str, Any]] = {
    "tensor_model_parallel_size": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
    "transformer_impl": {"transformer_impl": "transformer_engine"},
    "expert_tensor_parallel_size": {"expert_tensor_parallel_size": 2},
    "sequence_parallel": {"sequence_parallel": True, "tensor_model_parallel_size": 2},
    "virtual_pipeline_model_parallel_size": {
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    },
    "num_layers_in_first_pipeline_stage": {
        "num_layers_in_first_pipeline_stage": 3,
        "pipeline_model_parallel_size": 2,
    },
    "num_layers_in_last_pipeline_stage": {"num_layers_in_last_pipeline_stage": 3, "pipeline_model_parallel_size": 2},
    "pipeline_model_parallel_layout": {
        "pipeline_model_parallel_layout": "Et|tttL",
        "pipeline_model_parallel_size": 2,
    },
    "account_for_embedding_in_pipeline_split": {
        "account_for_embedding_in_pipeline_split": True,
        "pipeline_model_parallel_size": 5,
    },
    "account_for_loss_in_pipeline_split": {
        "account_for_loss_in_pipeline_split": True,
        "pipeline_model_parallel_size": 5,
    },
    "overlap_p2p_comm": {
        "overlap_p2p_comm": True,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    },
    "batch_p2p_comm": {
        "batch_p2p_comm": False,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    },
    "overlap_p2p_comm_warmup_flush": {
        "overlap_p2p_comm_warmup_flush": True,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    },
    "cpu_offloading": {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
    "cpu_offloading_num_layers": {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
    "recompute_granularity": {"recompute_granularity": "selective"},
    "recompute_method": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "recompute_num_layers": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "recompute_modules": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "distribute_saved_activations": {
        "distribute_saved_activations": True,
        "activation_checkpointing": True,
        "tensor_model_parallel_size": 2,
    },
    "fine_grained_activation_offloading": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["mlp_norm"],
    },
    "offload_modules": {"fine_grained_activation_offloading": True, "offload_modules": ["mlp_norm"]},
    "activation_offload_fraction": {"activation_offload_fraction": 0.5},
    "fp8_recipe": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "fp8_output_proj": {"fp8": "hybrid", "fp8_recipe": "mxfp8", "fp8_output_proj": True},
    "fp8_dot_product_attention": {"fp8": "hybrid", "fp8_dot_product_attention": True},
    "fp8_multi_head_attention": {"fp8": "hybrid", "fp8_multi_head_attention": True},
    "first_last_layers_bf16": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
    "fp8_quantizer_factory": {"fp8_quantizer_factory": "package.module.factory"},
    "fp4_quantizer_factory": {"fp4_quantizer_factory": "package.module.factory"},
    "fp4_recipe": {"fp4_recipe": "custom", "fp4_quantizer_factory": "package.module.factory"},
    "moe_router_load_balancing_type": {"moe_router_load_balancing_type": "aux_loss"},
    "moe_aux_loss_coeff": {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.01]},
    "moe_router_padding_for_quantization": {"fp8": "hybrid", "moe_router_padding_for_quantization": True},
    "moe_router_padding_for_fp8": {"fp8": "hybrid", "moe_router_padding_for_fp8": True},
    "moe_pad_expert_input_to_capacity": {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 2.0},
    "moe_token_dispatcher_type": {"moe_token_dispatcher_type": "allgather"},
    "cp_comm_type": {"cp_comm_type": "all_gather"},
    "config_logger_dir": {"config_logger_dir": "configs"},
    "optimizer_cpu_offload": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    "optimizer_offload_fraction": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    "main_grads_dtype": {"use_precision_aware_optimizer": True, "main_grads_dtype": "bfloat16"},
    "exp_avg_dtype": {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"},
    "exp_avg_sq_dtype": {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "bfloat16"},
    "min_lr": {"min_lr": 1e-4},
    "decoupled_min_lr": {"decoupled_lr": 1e-3, "decoupled_min_lr": 1e-4},
    "param_name_patterns_for_fp32_local_accumulation": {
        "param_name_patterns_for_fp32_local_accumulation": ["router"],
        "grad_reduce_in_fp32": False,
    },
    "reduce_scatter_with_fp32_accumulation": {
        "reduce_scatter_with_fp32_accumulation": True,
        "grad_reduce_in_fp32": False,
    },
    "grad_reduce_in_fp32": {"grad_reduce_in_fp32": False},
    "disable_symmetric_registration": {"nccl_ub": True, "disable_symmetric_registration": True},
}


def other_than_default(class_name: str, field: str) -> dict[str, Any]:
    """Settings that give the field a value which is not Megatron-Core's default."""
    if field in CHOSEN:
        return CHOSEN[field]
    entry, default = fields()[class_name][field], default_of(class_name, field)
    if entry["choices"]:
        return {field: next(choice for choice in entry["choices"] if choice != default)}
    for kind, value in (
        ("bool", default is not True),
        ("int", (default or 0) + 1 if isinstance(default, int | None) else 1),
        ("float", (default or 0.0) / 2 + 0.125 if isinstance(default, int | float | None) else 0.25),
        ("dtype", "bfloat16"),
        ("list", [2, 4]),
        ("str", "other"),
    ):
        if kind in entry["accepts"]:
            return {field: value}
    raise AssertionError(f"{class_name}.{field} accepts {entry['accepts']}: put a value into CHOSEN")


def as_read(value: Any) -> Any:
    """A value of Megatron's as a recipe writes it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return list(value)
    if hasattr(value, "input_data"):  # PipelineParallelLayerLayout
        return value.input_data
    return getattr(value, "name", value)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family in ("llama", "qwen3_moe"):
        folders[family] = tmp_path_factory.mktemp(family)
        write_model(family, folders[family], num_hidden_layers=4 if family == "llama" else 2)
    return folders


def refusals(class_name: str) -> dict[str, str]:
    """Field -> why a recipe cannot set it."""
    of_objects = {
        name: f"it is a {entry['type']}"
        for name, entry in fields()[class_name].items()
        if not entry["accepts"] or entry["accepts"] == ["null"]
    }
    fixed = {name: reason for name, (_, reason) in FIXED.items() if name in fields()[class_name]}
    return of_objects | DERIVED[class_name] | REFUSED[class_name] | fixed


SECTIONS = {
    "TransformerConfig": lambda values: values,
    "OptimizerConfig": lambda values: {"optimizer": values},
    "DistributedDataParallelConfig": lambda values: {"distributed_data_parallel_config": values},
}


def configs(folder: Path, settings: dict[str, Any], precision: str) -> dict[str, Any]:
    """What the trainer gives to Megatron, by class."""
    policy = recipe(folder, settings, precision)
    hf = read_config(folder, trust_remote_code=False)
    transformer = transformer_config(hf, family_of(hf), policy)
    ddp = ddp_config(policy)
    return {
        "TransformerConfig": transformer,
        "OptimizerConfig": optimizer_config(transformer, ddp, policy),
        "DistributedDataParallelConfig": ddp,
    }


def recipe(folder: Path, settings: dict[str, Any], precision: str) -> PolicyConfig:
    cfg = {**settings, "optimizer": {"lr": 1e-3} | settings.get("optimizer", {})}
    return policy_config(folder, precision=precision, megatron_cfg=cfg)


def test_every_field_reaches_megatron_or_is_refused_with_a_reason(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Covers: typos under megatron_cfg accepted; values set after Megatron's own validation.

    A field that needs a GPU or TransformerEngine is refused on a machine without; its way into the configuration is
    tried all the same, up to where Megatron itself asks for TransformerEngine."""
    forwarded, inert, hardware, refused = Counter(), 0, {}, Counter()
    for class_name in CLASSES:
        for field in fields()[class_name]:
            reason = refusals(class_name).get(field)
            if reason is not None:
                assert_refused(class_name, field)
                refused[reason] += 1
                continue
            folder = models["qwen3_moe" if field.startswith(("moe_", "expert_")) else "llama"]
            own = other_than_default(class_name, field)
            settings = SECTIONS[class_name](own)
            precision = "bfloat16" if field in {*NEEDS[class_name], "transformer_impl"} else "float32"
            policy = recipe(folder, settings, precision)
            assert megatron_problems(policy.megatron_cfg) == [], field
            assert setting_problems(policy, on_gpus=True) == [], field
            with monkeypatch.context() as patch:
                if list(needs(policy.megatron_cfg)):
                    if not torch.cuda.is_available():
                        with pytest.raises(UserError, match="needs a GPU"):
                            configs(folder, settings, precision)
                    patch.setattr(CHECK_HARDWARE, lambda policy: None)
                try:
                    built = configs(folder, settings, precision)[class_name]
                except UserError as error:
                    if field not in NEEDS[class_name]:
                        raise
                    hardware[f"{class_name}.{field}"] = error.message
                    continue
                untold = configs(folder, {}, precision)[class_name]
            found = as_read(getattr(built, field))
            assert found == own[field], field
            assert found != as_read(getattr(untold, field)), f"{field}: the value is the one that it has anyway"
            forwarded[class_name] += 1
            inert += field in INERT[class_name]
    with capsys.disabled():
        print(f"\nforwarded and read back: {sum(forwarded.values())} {dict(forwarded)}")
        print(f"  of these without effect here (megatron_limits.INERT): {inert}")
        print(f"only with TransformerEngine: {len(hardware)} {sorted(hardware)}")
        print(f"refused: {refused.total()}")
        for reason, count in refused.most_common():
            print(f"  {count:3d}  {reason}")
    assert sum(forwarded.values()) + len(hardware) + refused.total() == sum(len(fields()[name]) for name in CLASSES)


def assert_refused(class_name: str, field: str) -> None:
    """Any value but the default is refused by the recipe, and says why."""
    entry = fields()[class_name][field]
    value = {"bool": True, "int": 7, "float": 0.7, "str": "other", "list": [[7]]}
    value = next((value[kind] for kind in ("str", "float", "int", "list", "bool") if kind in entry["accepts"]), "other")
    if field in FIXED and isinstance(FIXED[field][0], bool):
        value = not FIXED[field][0]
    elif value is True and default_of(class_name, field) is True:
        value = False
    settings = SECTIONS[class_name]({field: value})
    cfg = MegatronConfig.model_validate({**settings, "optimizer": {"lr": 1e-3} | settings.get("optimizer", {})})
    (problem,) = megatron_problems(cfg)
    assert problem.where.endswith(f".{field}")
    assert "cannot" in problem.message or "can only be" in problem.message, problem


# Settings that one process on a CPU can have all at once.
TOGETHER: dict[str, Any] = {
    "deterministic_mode": True,
    "clone_scatter_output_in_embedding": False,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "mlp_chunks_for_training": 2,
    "recompute_granularity": "selective",
    "recompute_modules": ["moe"],
    "deallocate_pipeline_outputs": True,
    "batch_p2p_sync": False,
    "disable_bf16_reduced_precision_matmul": True,
    "moe_router_dtype": "fp64",
    "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": [0.01],
    "moe_z_loss_coeff": 0.001,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_bias_update_rate": 0.5,
    "moe_token_drop_policy": "position",
    "moe_expert_capacity_factor": 4.0,
    "distributed_data_parallel_config": {
        "grad_reduce_in_fp32": False,
        "overlap_grad_reduce": True,
        "bucket_size": 1000,
        "pad_buckets_for_high_nccl_busbw": True,
        "param_name_patterns_for_fp32_local_accumulation": ["router"],
    },
    "optimizer": {
        "lr": 1e-3,
        "min_lr": 1e-4,
        "weight_decay": 0.3,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_eps": 1e-6,
        "decoupled_lr": 2e-3,
        "decoupled_min_lr": 2e-4,
        "decoupled_weight_decay": False,
        "apply_wd_to_qk_layernorm": True,
    },
    "scheduler": {
        "lr_decay_style": "WSD",
        "lr_decay_iters": 12,
        "lr_warmup_iters": 3,
        "lr_warmup_init": 1e-6,
        "lr_wsd_decay_style": "cosine",
        "lr_wsd_decay_iters": 4,
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.3,
        "weight_decay_incr_style": "linear",
    },
}
HELD_BY_SCHEDULER = {"wd_incr_steps": 20, "max_lr": 1e-3, "min_lr": 1e-4}


def test_a_worker_holds_what_the_recipe_says(models: dict[str, Path]) -> None:
    """Read back where Megatron uses it: in every layer, in the data-parallel wrapper, the optimizer and the schedule."""
    folder = models["qwen3_moe"]
    policy = policy_config(folder, precision="float32", megatron_cfg=TOGETHER)
    assert megatron_problems(policy.megatron_cfg) == []
    assert setting_problems(policy, on_gpus=False) == []
    worker = trainer.MegatronPolicy(policy, 1.0, 20, folder)
    in_layer = worker.built.chunks[0].decoder.layers[0].mlp.router.config
    ddp, optimizer, scheduler = worker.model[0].ddp_config, worker.optimizer.config, worker.scheduler
    for given, holder in (
        ({key: value for key, value in TOGETHER.items() if not isinstance(value, dict)}, in_layer),
        (TOGETHER["distributed_data_parallel_config"], ddp),
        (TOGETHER["optimizer"], optimizer),
        ({SCHEDULER_ARGUMENTS[k]: v for k, v in TOGETHER["scheduler"].items()} | HELD_BY_SCHEDULER, scheduler),
    ):
        for name, value in given.items():
            assert as_read(getattr(holder, name)) == value, name
    assert TOGETHER["scheduler"].keys() == SCHEDULER_ARGUMENTS.keys()
    groups = {round(group["max_lr"], 9) for group in worker.optimizer.param_groups if "max_lr" in group}
    assert groups == {2e-3, 1e-3} or groups == {2e-3}
    stats = worker.train([random_batch(6)], policy_gradient_loss)
    assert not stats.skipped


@pytest.mark.parametrize(
    ("cfg", "expected", "concerned"),
    [
        (
            {"cpu_offloading": True, "cpu_offloading_num_layers": 4},
            "CPU offloading can be done only for layers less than 4",
            "cpu_offloading",
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tL"},
            "must match num_layers",
            "pipeline_model_parallel_layout",
        ),
        (
            {"tensor_model_parallel_size": 3},
            "num_attention_heads (4) must be a multiple of tensor_model_parallel_size (3)",
            "tensor_model_parallel_size",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mpl"]},
            "Invalid choices for recompute_modules",
            "recompute_modules",
        ),
        ({"expert_model_parallel_size": 2}, "num_moe_experts must be non None", "expert"),
    ],
)
def test_what_megatron_refuses_names_the_settings(
    cfg: dict[str, Any], expected: str, concerned: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As though the recipe had not been validated at all."""
    monkeypatch.setattr(CHECK_HARDWARE, lambda policy: None)
    with pytest.raises(UserError) as error:
        configs(models["llama"], cfg, "float32")
    assert expected in error.value.message
    assert concerned in f"{error.value.where} {error.value.mend}"


def test_no_code_sets_a_field_after_megatron_has_checked_it() -> None:
    """Covers: values set after Megatron's own validation. Hooks are no settings."""
    known = {name for class_name in CLASSES for name in fields()[class_name]}
    hooks = {name for name in known if "Callable" in fields()["TransformerConfig"].get(name, {"type": ""})["type"]}
    source = Path(trainer.__file__).parents[2]
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else ():
                if isinstance(target, ast.Attribute) and "config" in ast.unparse(target.value):
                    found.add(target.attr)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
                assert "config" not in ast.unparse(node.args[0]), f"{path}: {ast.unparse(node)}"
    assert found & known <= hooks
    assert found & hooks, "the search finds the hooks that the trainer sets"


def test_a_changed_copy_is_checked_again(models: dict[str, Path]) -> None:
    built = configs(models["llama"], {}, "float32")["TransformerConfig"]
    with pytest.raises(ValueError, match="sequence parallelism without tensor parallelism"):
        dataclasses.replace(built, sequence_parallel=True)


def test_enums_dtypes_and_tuples(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECK_HARDWARE, lambda policy: None)
    settings = {
        "attention_backend": "flash",
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "decoder", "decoder", "loss"]],
        "distributed_data_parallel_config": {
            "grad_reduce_in_fp32": False,
            "param_name_patterns_for_fp32_local_accumulation": ["a", "b"],
        },
    }
    built = configs(models["llama"], settings, "bfloat16")
    backend = built["TransformerConfig"].attention_backend
    assert isinstance(backend, enum.Enum) and backend.name == "flash"
    assert built["TransformerConfig"].params_dtype is torch.bfloat16
    layout = built["TransformerConfig"].pipeline_model_parallel_layout
    assert [len(stage[0]) for stage in layout.layout] == [2, 4]
    ddp = built["DistributedDataParallelConfig"]
    assert ddp.param_name_patterns_for_fp32_local_accumulation == ("a", "b")
