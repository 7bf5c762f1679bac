"""Parallel layouts against the cluster, each other and the model; and settings of Megatron-Core that exclude each other.

Covers: combinations that cannot work are found late, or never.
"""

from __future__ import annotations

from typing import Any

import pytest

from grpo_recipes.recipe.compose import resolve
from grpo_recipes.recipe.layout import layout_problems, parallel_problems
from grpo_recipes.recipe.megatron import megatron_problems
from grpo_recipes.recipe.megatron_combinations import setting_problems
from grpo_recipes.recipe.model_flops import ModelShape
from grpo_recipes.recipe.schema import ClusterConfig, MegatronConfig, PolicyConfig

DENSE = ModelShape(hidden=64, layers=8, heads=8, kv_heads=2, head_dim=16, ffn=96, vocab=100)
EXPERTS = ModelShape(
    hidden=64, layers=8, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=100, experts=6, expert_ffn=24, expert_layers=8
)
LR = {"lr": 1e-3}


def policy(precision: str = "bfloat16", **cfg: Any) -> PolicyConfig:
    return PolicyConfig(
        model_name="x",
        train_global_batch_size=1,
        max_total_sequence_length=8,
        precision=precision,
        generation={"max_new_tokens": 4},
        megatron_cfg={"optimizer": LR} | cfg,
    )


def said(problems: Any) -> list[str]:
    return [f"{p.where.removeprefix('policy.megatron_cfg.')}: {p.message} -> {p.mend}" for p in problems]


def on_cluster(cluster: dict[str, int], **cfg: Any) -> list[str]:
    recipe = resolve("tiny_arith", ()).recipe
    changed = recipe.model_copy(update={"policy": policy(**cfg), "cluster": ClusterConfig(**cluster)})
    return said(parallel_problems(changed))


GPUS, FOUR = {"gpus_per_node": 8}, {"cpu_processes": 4}
TP, PP, CP, EP, ETP = (
    f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)
VPP = "virtual_pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("cluster", "cfg"),
    [
        (GPUS, {TP: 4}),
        (GPUS, {TP: 4, CP: 2}),
        ({"num_nodes": 2, "gpus_per_node": 8}, {EP: 16}),
        (GPUS, {TP: 2, "sequence_parallel": True, EP: 4, ETP: 2}),
        (FOUR, {PP: 2, VPP: 2, "num_layers_in_first_pipeline_stage": 2}),
        ({"cpu_processes": 2}, {CP: 2}),
        ({"num_nodes": 2}, {PP: 2}),
    ],
)
def test_layouts_that_fit(cluster: dict[str, int], cfg: dict[str, Any]) -> None:
    assert on_cluster(cluster, **cfg) == []


@pytest.mark.parametrize(
    ("cluster", "cfg", "expected"),
    [
        (GPUS, {TP: 3}, "need groups of 3 processes, and cluster.num_nodes x cluster.gpus_per_node is 8"),
        (GPUS, {PP: 16}, "need groups of 16 processes"),
        (FOUR, {CP: 3}, "need groups of 3 processes, and cluster.num_nodes x cluster.cpu_processes is 4"),
        (
            GPUS,
            {EP: 3},
            "expert_model_parallel_size 3 x expert_tensor_parallel_size 1 x pipeline_model_parallel_size 1",
        ),
        (
            GPUS,
            {"sequence_parallel": True},
            "sequence_parallel: splits activations over tensor parallel ranks, and tens",
        ),
        (FOUR, {TP: 2, ETP: 2}, "expert_tensor_parallel_size: 2 needs GPUs (cluster.gpus_per_node is 0)"),
        (GPUS, {VPP: 2}, f"{VPP}: 2 stages on each rank need pipeline_model_parallel_size > 1, which is 1"),
        (GPUS, {TP: 3}, "-> set cluster.gpus_per_node to a multiple of 3"),
        (FOUR, {TP: 3}, "-> set cluster.cpu_processes (on GPUs cluster.gpus_per_node) to a multiple of 3"),
        (FOUR, {PP: 2, VPP: 0}, f"{VPP}: must be at least 1, is 0"),
        (FOUR, {PP: 2, "num_layers_in_first_pipeline_stage": 0}, "in_first_pipeline_stage: must be at least 1, is 0"),
        (GPUS, {"pipeline_model_parallel_layout": ""}, "means nothing: pipeline_model_parallel_size is 1"),
        (GPUS, {"pipeline_model_parallel_layout": "EttL"}, "means nothing: pipeline_model_parallel_size is 1"),
        (GPUS, {"num_layers_in_last_pipeline_stage": 3}, "means nothing: pipeline_model_parallel_size is 1"),
        (
            GPUS,
            {PP: 2, "pipeline_model_parallel_layout": "Et|tL", "account_for_loss_in_pipeline_split": True},
            "pipeline_model_parallel_layout: and account_for_loss_in_pipeline_split exclude each other",
        ),
        (
            GPUS,
            {PP: 2, "num_layers_in_first_pipeline_stage": 1, "account_for_loss_in_pipeline_split": True},
            "num_layers_in_first_pipeline_stage: and account_for_loss_in_pipeline_split exclude each other",
        ),
        (GPUS, {PP: 2, "num_layers_in_first_pipeline_stage": -1}, "must be at least 1, is -1"),
        ({"gpus_per_node": 1, "cpu_processes": 2}, {}, "cluster.cpu_processes: and gpus_per_node 1 are both set"),
    ],
)
def test_layouts_that_do_not_fit(cluster: dict[str, int], cfg: dict[str, Any], expected: str) -> None:
    found = on_cluster(cluster, **cfg)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("shape", "cfg"),
    [
        (DENSE, {TP: 2, PP: 4}),
        (DENSE, {TP: 8}),  # each of the 2 key-value heads is copied to 4 ranks
        (DENSE, {PP: 2, VPP: 4}),
        (DENSE, {PP: 3, "num_layers_in_first_pipeline_stage": 2}),
        (DENSE, {PP: 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 5}),
        (DENSE, {PP: 5, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
        (DENSE, {PP: 2, "pipeline_model_parallel_layout": "Et*5|tttL"}),
        (DENSE, {PP: 2, VPP: 2, "pipeline_model_parallel_layout": "E(t|)*3,t*5L"}),
        (
            DENSE,
            {PP: 2, "pipeline_model_parallel_layout": [["embedding", *["decoder"] * 3], [*["decoder"] * 5, "loss"]]},
        ),
        (EXPERTS, {EP: 3, ETP: 4, TP: 4, "sequence_parallel": True}),
    ],
)
def test_layouts_that_divide_the_model(shape: ModelShape, cfg: dict[str, Any]) -> None:
    assert layout_problems(policy(**cfg).megatron_cfg, shape) == []


@pytest.mark.parametrize(
    ("shape", "cfg", "expected"),
    [
        (DENSE, {TP: 16}, "tensor_model_parallel_size: 16 does not divide the model's 8 attention heads"),
        (EXPERTS, {EP: 4}, "expert_model_parallel_size: 4 does not divide the model's 6 experts"),
        (EXPERTS, {ETP: 5}, "expert_tensor_parallel_size: 5 does not divide the model's 24 rows"),
        (
            EXPERTS,
            {TP: 2},
            "sequence_parallel: must be true: the model has experts, and tensor_model_parallel_size is 2",
        ),
        (DENSE, {EP: 2}, "expert_model_parallel_size: is 2, and the model has no experts to spread"),
        (DENSE, {PP: 3}, "pipeline_model_parallel_size 3 does not divide the model's 8 layers"),
        (DENSE, {PP: 4, VPP: 4}, "4 x virtual_pipeline_model_parallel_size 4 does not divide the model's 8 layers"),
        (
            DENSE,
            {PP: 4, "account_for_loss_in_pipeline_split": True},
            "8 layers (and 1 for account_for_loss_in_pipeline_split)",
        ),
        (
            DENSE,
            {PP: 10, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            "leaves a stage without any layer",
        ),
        (
            DENSE,
            {PP: 3, "num_layers_in_first_pipeline_stage": 3},
            "3 in the first stage leave 5 of the 8 layers for 2 stages (pipeline_model_parallel_size 3)",
        ),
        (
            DENSE,
            {PP: 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 4},
            "3 in the first stage, 4 in the last stage leave 1 of the 8 layers for 0 stages",
        ),
        (DENSE, {PP: 2, VPP: 2, "num_layers_in_last_pipeline_stage": 3}, "must be a multiple of virtual_pipeline"),
        (DENSE, {PP: 2, "pipeline_model_parallel_layout": "Et*4|t*3L"}, "has 7 layers, and the model has 8"),
        (DENSE, {PP: 2, "pipeline_model_parallel_layout": "Et*8L"}, "has 1 stages, and pipeline_model_parallel_size x"),
        (DENSE, {PP: 2, "pipeline_model_parallel_layout": "E|t*8L"}, "has a stage without any layer"),
        (DENSE, {PP: 2, "pipeline_model_parallel_layout": "Et*4|mt*4L"}, "'m' is none of E (embedding)"),
        (DENSE, {PP: 2, "pipeline_model_parallel_layout": "t*4|Et*4L"}, "must begin with the embedding"),
        (DENSE, {PP: 2, "pipeline_model_parallel_layout": [["embedding"], "x"]}, "must be a list of stages"),
    ],
)
def test_layouts_that_do_not_divide_the_model(shape: ModelShape, cfg: dict[str, Any], expected: str) -> None:
    found = said(layout_problems(policy(**cfg).megatron_cfg, shape))
    assert len(found) == 1
    assert expected in found[0]


def test_an_odd_number_of_key_value_heads() -> None:
    found = said(layout_problems(policy(**{TP: 4}).megatron_cfg, ModelShape(64, 8, 12, 3, 16, 96, 100)))
    assert found == [
        "tensor_model_parallel_size: 4 does not divide the model's 3 key-value heads -> set a divisor of 3"
    ]


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({"recompute_granularity": "full"}, "recompute_granularity: full needs recompute_method"),
        ({"recompute_num_layers": 2}, "recompute_num_layers: belongs to recompute_granularity full, which is None"),
        ({"recompute_modules": ["mlp"]}, "recompute_modules: belongs to recompute_granularity selective"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mpl"]}, "'mpl' is not one of core_attn, layern"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "moe_act needs moe_grouped_gemm"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 1}, "belongs to recompute_granularity full"),
        ({"distribute_saved_activations": True}, "and needs tensor_model_parallel_size > 1"),
        ({"activation_checkpointing": True, "moe_layer_recompute": True}, "is part of recompute_granularity full"),
        ({"cpu_offloading": True}, "cpu_offloading_num_layers: cpu_offloading needs at least 1"),
        ({"cpu_offloading_num_layers": 1}, "does nothing without cpu_offloading"),
        (
            {"cpu_offloading": True, "cpu_offloading_num_layers": 1, PP: 2},
            "cpu_offloading: does not work with pipeline_model_parallel_size > 1",
        ),
        (
            {"cpu_offloading": True, "cpu_offloading_num_layers": 1, "activation_checkpointing": True},
            "cpu_offloading: does not work with recompute_granularity or activation_checkpointing",
        ),
        ({"fine_grained_activation_offloading": True}, "offload_modules: fine_grained_activation_offloading needs"),
        ({"offload_modules": ["mlp_norm"]}, "does nothing without fine_grained_activation_offloading"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj"]},
            "attn_proj needs core_attn, whose output it takes",
        ),
        ({"fp8": "hybrid", "fp4": "e2m1"}, "fp4: and fp8 exclude each other"),
        ({"fp8_recipe": "blockwise"}, "fp8_recipe: does nothing without fp8"),
        ({"fp8": "e4m3", "fp8_recipe": "custom"}, "fp8_recipe: custom needs fp8_quantizer_factory"),
        ({"fp8": "e4m3", "first_last_layers_bf16": True}, "does not work with fp8_recipe delayed"),
        ({"fp8": "e4m3", "fp8_output_proj": True}, "fp8_output_proj: needs fp8 and fp8_recipe mxfp8"),
        ({"optimizer": LR | {"exp_avg_dtype": "bfloat16"}}, "bfloat16 needs use_precision_aware_optimizer"),
        ({"optimizer": LR | {"optimizer_cpu_offload": True}}, "optimizer_cpu_offload of 0 moves nothing"),
        ({"optimizer": LR | {"optimizer_offload_fraction": 0.5}}, "does nothing without optimizer_cpu_offload"),
        ({"optimizer": LR | {"optimizer_offload_fraction": 1.5}}, "must lie between 0 and 1, is 1.5"),
        (
            {
                "optimizer": LR
                | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "decoupled_weight_decay": False}
            },
            "optimizer_cpu_offload works with decoupled decay only",
        ),
        ({"optimizer": LR | {"decoupled_min_lr": 1e-5}}, "decoupled_min_lr: does nothing without decoupled_lr"),
        ({"distributed_data_parallel_config": {"num_buckets": 2, "bucket_size": 9}}, "and bucket_size exclude"),
        (
            {"distributed_data_parallel_config": {"param_name_patterns_for_fp32_local_accumulation": ["x"]}},
            "and grad_reduce_in_fp32 (true unless set) covers all",
        ),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, "cannot be seq_aux_loss: sequences lie end to end"),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, "so that it depends on the layout"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "it routes differently in training and in generation"),
        ({"moe_router_load_balancing_type": "auxloss"}, "should be none or aux_loss, is 'auxloss'"),
        ({"moe_router_load_balancing_type": ["aux_loss"]}, "must be lists of one length, or neither a list"),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, "does nothing: moe_router_load_balan"),
        ({"moe_aux_loss_coeff": 0.1}, "moe_router_load_balancing_type is none unless set"),
        (
            {"moe_aux_loss_coeff": -1, "moe_router_load_balancing_type": "aux_loss"},
            "moe_aux_loss_coeff: must not be negative, is -1",
        ),
        ({"moe_token_dispatcher_type": "flex"}, "flex needs DeepEP, HybridEP or NCCL EP"),
        ({"moe_token_dispatcher_type": "allgather", PP: 2}, "allgather refuses sequences of different lengths"),
        (
            {"moe_token_dispatcher_type": "allgather", EP: 2},
            "allgather needs equally many tokens on each of the 2 ranks",
        ),
        ({"moe_pad_expert_input_to_capacity": True}, "needs moe_expert_capacity_factor"),
        ({"moe_router_padding_for_fp8": True}, "needs fp8 or fp4, and the alltoall dispatcher"),
        ({"overlap_p2p_comm": True}, "overlap_p2p_comm: works between virtual stages only"),
        ({PP: 2, VPP: 2, "batch_p2p_comm": True}, "batch_p2p_comm: must be false between virtual stages"),
    ],
)
def test_settings_that_exclude_each_other(cfg: dict[str, Any], expected: str) -> None:
    cfg = {"optimizer": LR} | cfg
    assert megatron_problems(MegatronConfig.model_validate(cfg)) == []
    found = said(setting_problems(policy(**cfg), on_gpus=True))
    assert any(expected in line for line in found), found


@pytest.mark.parametrize(
    "cfg",
    [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
        {"activation_checkpointing": True, "recompute_granularity": "selective"},
        {"activation_checkpointing": True, "recompute_method": "block", "recompute_num_layers": 2},
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_proj"]},
        {"fp8": "hybrid", "fp8_recipe": "blockwise"},
        {"optimizer": LR | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}},
        {"optimizer": LR | {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}},
        {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.01], "moe_z_loss_coeff": 0.001},
        {"moe_token_dispatcher_type": "allgather", TP: 2, "sequence_parallel": True, EP: 2},
    ],
)
def test_settings_that_work_together_on_gpus(cfg: dict[str, Any]) -> None:
    assert megatron_problems(MegatronConfig.model_validate({"optimizer": LR} | cfg)) == []
    assert setting_problems(policy(**cfg), on_gpus=True) == []


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({"fp8": "hybrid"}, 'fp8: "hybrid" needs TransformerEngine, which needs a GPU, and cluster.gpus_per_node is 0'),
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm: true needs TransformerEngine"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
            'recompute_modules: ["layernorm"] needs TransformerEngine',
        ),
        ({"optimizer": LR | {"use_precision_aware_optimizer": True}}, "needs TransformerEngine"),
        (
            {"optimizer": LR | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}},
            "optimizer.optimizer_cpu_offload: true needs a GPU",
        ),
    ],
)
def test_what_needs_a_gpu(cfg: dict[str, Any], expected: str) -> None:
    assert setting_problems(policy(**cfg), on_gpus=True) == []
    assert expected in said(setting_problems(policy(**cfg), on_gpus=False))[0]


def test_float32_refuses_what_is_for_bfloat16() -> None:
    cfg = {"fp8": "hybrid", "optimizer": LR | {"use_precision_aware_optimizer": True}}
    found = said(setting_problems(policy("float32", **cfg), on_gpus=True))
    assert [line.partition(",")[0] for line in found] == [
        "fp8: needs policy.precision bfloat16",
        "optimizer.use_precision_aware_optimizer: needs policy.precision bfloat16",
    ]
