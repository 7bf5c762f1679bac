"""policy.megatron_cfg against Megatron-Core's own fields."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.recipe.megatron import (
    FIELDS_FILE,
    SCHEDULER_ARGUMENTS,
    default_of,
    fields,
    megatron_problems,
    scheduler_arguments,
)
from grpo_recipes.recipe.megatron_limits import DERIVED, INERT, NEEDS, OTHER_NAMES, REFUSED
from grpo_recipes.recipe.schema import MegatronConfig


def problems(**cfg: Any) -> list[str]:
    cfg.setdefault("optimizer", {"lr": 1e-3})
    found = megatron_problems(MegatronConfig.model_validate(cfg))
    return [f"{p.where.removeprefix('policy.megatron_cfg.')}: {p.message} -> {p.mend}" for p in found]


def test_the_snapshot_is_that_of_the_installed_megatron_core() -> None:
    """In a process of its own: Megatron-Core is slow to import and sets global state."""
    code = (
        "import json; from grpo_recipes.policy.megatron.field_snapshot import snapshot; print(json.dumps(snapshot()))"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout.splitlines()[-1]) == json.loads(FIELDS_FILE.read_text())


def test_the_snapshot_is_of_the_pinned_version() -> None:
    import yaml

    stacks = yaml.safe_load((Path(__file__).parents[2] / "containers" / "stack.yaml").read_text())
    pinned = stacks["stacks"][stacks["current"]]["packages"]["megatron-core"]
    assert json.loads(FIELDS_FILE.read_text())["megatron_core"] == pinned


def test_fields_of_megatron_core_are_accepted() -> None:
    assert (
        problems(
            recompute_granularity="full",
            moe_aux_loss_coeff=0,
            pipeline_model_parallel_layout="Et|tL",
            apply_rope_fusion=False,
            attention_backend="flash",
            distribute_saved_activations=None,
            optimizer={"lr": 1e-3, "exp_avg_dtype": "bfloat16", "adam_eps": 1e-9},
            distributed_data_parallel_config={"grad_reduce_in_fp32": True, "bucket_size": None},
            scheduler={"lr_decay_style": "cosine", "lr_decay_iters": 100, "lr_warmup_iters": 10, "lr_warmup_init": 0},
        )
        == []
    )


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        # Covers: typos under megatron_cfg accepted.
        ({"recompute_granularty": "full"}, "did you mean policy.megatron_cfg.recompute_granularity"),
        (
            {"tensor_parallel_size": 2},
            "did you mean policy.megatron_cfg.tensor_model_parallel_size or "
            "policy.megatron_cfg.expert_tensor_parallel_size",
        ),
        (
            {"adam_beta1": 0.9},
            "is not a field of Megatron-Core's TransformerConfig -> did you mean policy.megatron_cfg.optimizer.adam_beta1?",
        ),
        ({"hidden_size": 8}, "hidden_size: cannot be set: it is read from the model's config.json"),
        ({"bf16": True}, "bf16: cannot be set: it follows policy.precision"),
        ({"activation_func": "gelu"}, "which a recipe cannot express"),
        ({"apply_rope_fusion": True}, "apply_rope_fusion: can only be false"),
        ({"recompute_granularity": "ful"}, "should be one of full, selective, is 'ful' -> did you mean full?"),
        ({"attention_backend": "flsh"}, "did you mean flash?"),
        ({"moe_z_loss_coeff": "x"}, "moe_z_loss_coeff: should be float or null, is 'x'"),
        ({"moe_z_loss_coeff": math.inf}, "should be finite"),
        ({"moe_expert_capacity_factor": True}, "should be float or null, is True"),
        ({"cpu_offloading": 1}, "cpu_offloading: should be bool, is 1"),
        ({"recompute_num_layers": 1.5}, "recompute_num_layers: should be int or null, is 1.5"),
        (
            {"optimizer": {"lr": 1e-3, "beta1": 0.9}},
            "optimizer.beta1: is not a field of Megatron-Core's OptimizerConfig",
        ),
        ({"optimizer": {"lr": 1e-3, "clip_grad": 1.0}}, "optimizer.clip_grad: cannot be set: set policy.max_grad_norm"),
        ({"optimizer": {"lr": 1e-3, "exp_avg_dtype": "bf16"}}, "should name a torch dtype"),
        ({"optimizer": {"lr": 1e-3, "optimizer": "sgd"}}, 'optimizer.optimizer: can only be "adam"'),
        (
            {"optimizer": {"lr": 1e-3, "use_distributed_optimizer": False}},
            "use_distributed_optimizer: can only be true",
        ),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr: should be float or null, is 'fast'"),
        ({"optimizer": {"lr": -1.0}}, "optimizer.lr: the learning rate must be greater than 0, is -1.0"),
        ({"optimizer": {}}, "optimizer.lr: the learning rate must be greater than 0, is None"),
        ({"optimizer": {"lr": 1e-3, "min_lr": 1e-2}}, "optimizer.min_lr: 0.01 exceeds lr 0.001"),
        ({"optimizer": {"lr": 1e-3, "weight_decay": -1}}, "optimizer.weight_decay: must not be negative"),
        ({"optimizer": {"lr": 1e-3, "adam_beta2": 1.0}}, "optimizer.adam_beta2: must lie in [0, 1)"),
        ({"scheduler": {"lr_warmup_steps": 3}}, "did you mean policy.megatron_cfg.scheduler.lr_warmup_iters?"),
        ({"scheduler": {"max_lr": 3.0}}, "set policy.megatron_cfg.optimizer.lr"),
        ({"scheduler": {"lr_decay_style": "cosin"}}, "did you mean cosine?"),
        ({"scheduler": {"lr_decay_iters": 5, "lr_warmup_iters": 5}}, "leave nothing of lr_decay_iters 5"),
        ({"scheduler": {"lr_warmup_iters": -1}}, "lr_warmup_iters: must not be negative"),
        ({"scheduler": {"lr_warmup_init": 1.0}}, "lr_warmup_init: must lie between 0 and optimizer.lr"),
        ({"scheduler": {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}}, "lr_wsd_decay_iters: is missing"),
        ({"scheduler": {"end_weight_decay": 0.5}}, "weight decay goes from 0.01 to 0.5"),
        ({"distributed_data_parallel_config": {"average_in_collective": True}}, "cannot be set: the engine's loss"),
        ({"distributed_data_parallel_config": {"grad_reduce_fp32": True}}, "grad_reduce_in_fp32"),
        ({"window_size": [128, 0]}, "window_size: cannot be [128, 0]: the engine's attention module has no such"),
        ({"mtp_num_layers": 1}, "mtp_num_layers: cannot be 1: no supported model family has it"),
        ({"moe_enable_routing_replay": True}, "no sampler here reports which experts it chose"),
        ({"cuda_graph_impl": "local"}, "CUDA graphs need batches of one shape"),
        ({"tp_comm_overlap": True}, "user buffers need batches of one shape"),
        ({"fp8_param": True}, "exchanged with Hugging Face and the sampler in policy.precision"),
        ({"distributed_data_parallel_config": {"use_megatron_fsdp": True}}, "FSDP stores parameters in another layout"),
        ({"distributed_data_parallel_config": {"overlap_param_gather": True}}, "would still be stale"),
        (
            {"optimizer": {"lr": 1e-3, "loss_scale": 2.0}},
            "loss_scale: cannot be 2.0: losses are scaled only for float16",
        ),
        ({"scheduler": {"wd_incr_steps": 3}}, "wd_incr_steps: cannot be set: it is the number of optimizer steps"),
        ({"converter_type": "LlamaForCausalLM"}, "converter_type: means nothing here: the model's family follows"),
        ({"env_vars": {"A": "1"}}, "env_vars: means nothing here: environment variables belong to the launcher"),
        ({"fp8_cfg": {"enabled": True}}, "-> set policy.megatron_cfg.fp8 and policy.megatron_cfg.fp8_recipe"),
        ({"peft": {"enabled": True, "dim": 8}}, "peft: means nothing here: LoRA is not supported"),
        ({"defer_fp32_logits": True}, "logprobs are computed in chunks"),
    ],
)
def test_mistakes(cfg: dict[str, Any], expected: str) -> None:
    found = problems(**cfg)
    assert len(found) == 1
    assert expected in found[0]


def test_scheduler_names_cover_arguments_that_exist() -> None:
    known = fields()["OptimizerParamScheduler"].keys()
    assert set(SCHEDULER_ARGUMENTS.values()) <= known
    derived = {
        "max_lr",
        "min_lr",
        "wd_incr_steps",
        "use_checkpoint_opt_param_scheduler",
        "override_opt_param_scheduler",
    }
    assert known - set(SCHEDULER_ARGUMENTS.values()) == derived


def test_scheduler_arguments() -> None:
    cfg = MegatronConfig(
        optimizer={"lr": 2e-4, "min_lr": 1e-5, "weight_decay": 0.1},
        scheduler={"lr_decay_style": "linear", "lr_decay_iters": 80, "lr_warmup_iters": 5, "lr_warmup_init": 1e-6},
    )
    assert scheduler_arguments(cfg, total_steps=100) == {
        "max_lr": 2e-4,
        "min_lr": 1e-5,
        "init_lr": 1e-6,
        "lr_warmup_steps": 5,
        "lr_decay_steps": 80,
        "lr_decay_style": "linear",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 100,
        "wd_incr_style": "constant",
    }
    unset = MegatronConfig(optimizer={"lr": 1e-3}, scheduler={"lr_decay_iters": None})
    assert megatron_problems(unset) == []
    assert scheduler_arguments(unset, total_steps=10)["lr_decay_steps"] == 10
    plain = scheduler_arguments(MegatronConfig(optimizer={"lr": 1e-3}), total_steps=10)
    assert (plain["lr_decay_style"], plain["lr_decay_steps"], plain["start_wd"]) == ("constant", 10, 0.01)


def test_defaults_as_a_recipe_writes_them() -> None:
    assert default_of("TransformerConfig", "attention_backend") == "auto"
    assert default_of("TransformerConfig", "moe_aux_loss_coeff") == 0.0
    assert default_of("OptimizerConfig", "exp_avg_dtype") == "float32"
    assert default_of("DistributedDataParallelConfig", "param_name_patterns_for_fp32_local_accumulation") == []


def test_every_table_speaks_of_fields_that_exist() -> None:
    for table in (DERIVED, REFUSED, INERT, NEEDS):
        for class_name, entries in table.items():
            assert entries.keys() <= fields()[class_name].keys(), class_name
    for class_name in DERIVED:
        tables = [table.get(class_name, {}).keys() for table in (DERIVED, REFUSED, INERT, NEEDS)]
        assert len(set().union(*tables)) == sum(map(len, tables)), "a field is in one table"
    assert not OTHER_NAMES.keys() & fields()["TransformerConfig"].keys()


@pytest.mark.parametrize(
    "harmless",
    [
        {"mtp_num_layers": 0, "mtp_loss_scaling_factor": 0.0, "mtp_detach_heads": False},
        {"cuda_graph_impl": "none", "cuda_graph_modules": [], "cuda_graph_warmup_steps": 3},
        {"moe_enable_deepep": False, "moe_shared_expert_overlap": False, "moe_per_layer_logging": False},
        {"use_fused_weighted_squared_relu": False, "gradient_accumulation_fusion": False},
        {"defer_fp32_logits": None, "env_vars": None, "fp8_cfg": {"enabled": False}, "peft": {"enabled": False}},
        {"force_reconvert_from_hf": False, "use_gloo_process_groups": False, "use_fused_linear_logprobs": False},
        {"optimizer": {"lr": 1e-3, "sgd_momentum": 0.9, "optimizer_cpu_offload": False}},
        {"distributed_data_parallel_config": {"use_custom_fsdp": False, "overlap_param_gather": False}},
    ],
)
def test_what_is_switched_off_may_be_said(harmless: dict[str, Any]) -> None:
    """As published recipes for NeMo-RL do."""
    assert problems(**harmless) == []


# Every key under policy.megatron_cfg of NeMo-RL's GRPO recipes (v0.3 to v0.7) that is no mapping itself, with a value
# that they give it.
NEMO_RL_ACCEPTED: dict[str, Any] = {
    "enabled": True,
    "empty_unused_memory_level": 1,
    "activation_checkpointing": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "freeze_moe_router": True,
    "moe_router_dtype": "fp64",
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.0,
    "moe_permute_fusion": False,
    "moe_per_layer_logging": False,
    "moe_enable_deepep": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
    "moe_grouped_gemm": True,
    "bias_activation_fusion": True,
    "gradient_accumulation_fusion": False,
    "use_fused_weighted_squared_relu": False,
    "mtp_num_layers": 0,
    "mtp_loss_scaling_factor": 0.0,
    "mtp_use_repeated_layer": False,
    "mtp_detach_heads": False,
    "recompute_granularity": "full",
    "recompute_modules": None,
    "fine_grained_activation_offloading": False,
    "offload_modules": None,
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "cuda_graph_warmup_steps": 3,
    "force_reconvert_from_hf": False,
    "use_gloo_process_groups": False,
    "use_fused_linear_logprobs": False,
    "defer_fp32_logits": False,
    "env_vars": None,
    "fp8_cfg": None,
    "peft": {"enabled": False, "dim": 8},
    "optimizer": {
        "optimizer": "adam",
        "lr": 3e-7,
        "min_lr": 3e-8,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "sgd_momentum": 0.9,
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": True,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
        "overlap_cpu_optimizer_d2h_h2d": False,
    },
    "scheduler": {
        "start_weight_decay": 0.01,
        "end_weight_decay": 0.01,
        "weight_decay_incr_style": "constant",
        "lr_decay_style": "constant",
        "lr_decay_iters": 1000,
        "lr_warmup_iters": 13,
        "lr_warmup_init": 3e-8,
    },
    "distributed_data_parallel_config": {
        "grad_reduce_in_fp32": False,
        "overlap_grad_reduce": True,
        "use_custom_fsdp": False,
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
}


def test_keys_of_published_recipes_are_accepted() -> None:
    assert problems(**NEMO_RL_ACCEPTED) == []


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({"apply_rope_fusion": True}, "can only be false"),
        ({"pipeline_dtype": "bfloat16"}, "it follows policy.precision"),
        ({"optimizer": {"lr": 1e-3, "bf16": True}}, "it follows policy.precision"),
        ({"optimizer": {"lr": 1e-3, "params_dtype": "float32"}}, "it follows policy.precision"),
        ({"optimizer": {"lr": 1e-3, "clip_grad": 1.0}}, "set policy.max_grad_norm"),
        (
            {"distributed_data_parallel_config": {"average_in_collective": True}},
            "already carries its global denominator",
        ),
        ({"distributed_data_parallel_config": {"overlap_param_gather": True}}, "would still be stale"),
        ({"converter_type": "Qwen2ForCausalLM"}, "the model's family follows from its config.json"),
        ({"checkpoint": {"async_save": True}}, "see checkpointing"),
        ({"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}}, "the launcher's profile"),
        ({"defer_fp32_logits": True}, "logits are never whole in float32"),
        ({"fused_linear_logprobs_chunk_size": 256}, "in chunks of a fixed size"),
        ({"fp8_cfg": {"enabled": True, "fp8": "e4m3", "fp8_recipe": "blockwise"}}, "set policy.megatron_cfg.fp8 and"),
    ],
)
def test_keys_of_published_recipes_that_mean_something_else_here(cfg: dict[str, Any], expected: str) -> None:
    found = problems(**cfg)
    assert len(found) == 1
    assert expected in found[0]
