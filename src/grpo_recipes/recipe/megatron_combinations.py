"""Settings of policy.megatron_cfg that cannot work together, or not on the recipe's hardware. Without torch.

Megatron-Core refuses many more when its configuration is built (policy/megatron/config.py passes that on); here are
those that a recipe is likely to meet, so that they are found before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_recipes.recipe.megatron import given_fields, is_default
from grpo_recipes.recipe.megatron_limits import NEEDS
from grpo_recipes.recipe.problems import Problem
from grpo_recipes.recipe.schema import MegatronConfig, PolicyConfig

WHERE = "policy.megatron_cfg"

RECOMPUTABLE = ("core_attn", "layernorm", "mlp", "moe", "moe_act")
RECOMPUTABLE_BY_TE = ("layernorm", "moe_act")
OFFLOADABLE = ("qkv_linear", "core_attn", "attn_proj", "attn_norm", "mlp_norm", "expert_fc1", "moe_act")
_NOT_BALANCED = {
    "seq_aux_loss": "sequences lie end to end in a microbatch, so that it would be that of the whole pack: set aux_loss",
    "global_aux_loss": "Megatron-Core divides it by the data parallel size and averages the experts' load over the "
    "microbatches seen so far, so that it depends on the layout: set aux_loss",
    "sinkhorn": "it routes differently in training and in generation",
    "quantile_balancing": "it adds a bias for which a Hugging Face checkpoint has no place",
}


def setting_problems(policy: PolicyConfig, on_gpus: bool) -> list[Problem]:
    """Combinations, and settings that the hardware does not have. Assumes that every single value is valid."""
    cfg = policy.megatron_cfg
    given = given_fields(cfg)
    return [
        *_hardware(cfg, on_gpus),
        *_recompute(cfg, given),
        *_offload(cfg, given),
        *_low_precision(policy, given),
        *_optimizer(policy),
        *_gradients(cfg.distributed_data_parallel_config),
        *_experts(cfg, given),
        *_pipeline_communication(given),
    ]


def needs(cfg: MegatronConfig) -> Iterator[tuple[str, Any, str]]:
    """(path, value, "te" or "gpu") of each setting that needs TransformerEngine or a GPU."""
    for section, class_name, given in (
        ("", "TransformerConfig", given_fields(cfg)),
        ("optimizer.", "OptimizerConfig", cfg.optimizer),
        ("distributed_data_parallel_config.", "DistributedDataParallelConfig", cfg.distributed_data_parallel_config),
    ):
        for key, value in given.items():
            if key in NEEDS[class_name] and not is_default(class_name, key, value):
                yield f"{WHERE}.{section}{key}", value, NEEDS[class_name][key]
    if cfg.transformer_impl == "transformer_engine":
        yield f"{WHERE}.transformer_impl", cfg.transformer_impl, "te"
    fused = [name for name in given_fields(cfg).get("recompute_modules") or () if name in RECOMPUTABLE_BY_TE]
    if fused:
        yield f"{WHERE}.recompute_modules", fused, "te"


def _hardware(cfg: MegatronConfig, on_gpus: bool) -> Iterator[Problem]:
    for path, value, need in needs(cfg):
        if not on_gpus:
            what = "TransformerEngine, which needs a GPU" if need == "te" else "a GPU"
            yield Problem(
                path,
                f"{json.dumps(value)} needs {what}, and cluster.gpus_per_node is 0",
                "remove it, or set cluster.gpus_per_node",
            )


def _recompute(cfg: MegatronConfig, given: Mapping[str, Any]) -> Iterator[Problem]:
    where = f"{WHERE}.recompute_granularity"
    granularity = given.get("recompute_granularity")
    method, layers = given.get("recompute_method"), given.get("recompute_num_layers")
    modules = given.get("recompute_modules")
    if granularity == "full" and not cfg.activation_checkpointing:
        for name, value in (("recompute_method", method), ("recompute_num_layers", layers)):
            if value is None:
                yield Problem(where, f"full needs {name}", f"set {WHERE}.{name} (uniform and 1 keep least)")
    if (granularity != "full" and not cfg.activation_checkpointing) or granularity == "selective":
        for name, value in (("recompute_method", method), ("recompute_num_layers", layers)):
            if value is not None:
                yield Problem(
                    f"{WHERE}.{name}", f"belongs to recompute_granularity full, which is {granularity}", "remove it"
                )
    if layers is not None and layers < 1:
        yield Problem(f"{WHERE}.recompute_num_layers", f"must be at least 1, is {layers}", "correct it")
    if modules and granularity != "selective":
        yield Problem(
            f"{WHERE}.recompute_modules",
            f"belongs to recompute_granularity selective, which is {granularity}",
            f"set {where} to selective",
        )
    yield from _listed("recompute_modules", modules, RECOMPUTABLE)
    if modules and "moe_act" in modules and not given.get("moe_grouped_gemm"):
        yield Problem(f"{WHERE}.recompute_modules", "moe_act needs moe_grouped_gemm", "set it, or recompute moe")
    if given.get("moe_layer_recompute") and (granularity == "full" or cfg.activation_checkpointing):
        yield Problem(f"{WHERE}.moe_layer_recompute", "is part of recompute_granularity full already", "remove it")
    if given.get("distribute_saved_activations") and (
        cfg.sequence_parallel or cfg.tensor_model_parallel_size == 1 or granularity == "selective"
    ):
        yield Problem(
            f"{WHERE}.distribute_saved_activations",
            "cuts what full recomputation keeps over tensor parallel ranks, and needs tensor_model_parallel_size > 1, "
            "sequence_parallel false and recompute_granularity full",
            "remove it; sequence_parallel does the same for all activations",
        )


def _listed(key: str, found: Sequence[Any] | None, allowed: tuple[str, ...]) -> Iterator[Problem]:
    for name in found or ():
        if name not in allowed:
            yield Problem(f"{WHERE}.{key}", f"{name!r} is not one of {', '.join(allowed)}", "correct it")


def _offload(cfg: MegatronConfig, given: Mapping[str, Any]) -> Iterator[Problem]:
    layers = given.get("cpu_offloading_num_layers", 0)
    if given.get("cpu_offloading"):
        where = f"{WHERE}.cpu_offloading"
        if layers < 1:
            yield Problem(f"{WHERE}.cpu_offloading_num_layers", "cpu_offloading needs at least 1", "set it")
        if cfg.pipeline_model_parallel_size > 1:
            yield Problem(where, "does not work with pipeline_model_parallel_size > 1", "set one of them back")
        if given.get("recompute_granularity") or cfg.activation_checkpointing:
            yield Problem(where, "does not work with recompute_granularity or activation_checkpointing", "choose one")
    elif layers:
        yield Problem(f"{WHERE}.cpu_offloading_num_layers", "does nothing without cpu_offloading", "set that, too")
    modules = given.get("offload_modules")
    fine = given.get("fine_grained_activation_offloading")
    yield from _listed("offload_modules", modules, OFFLOADABLE)
    if fine and not modules:
        yield Problem(f"{WHERE}.offload_modules", "fine_grained_activation_offloading needs at least one", "set it")
    if modules and not fine:
        yield Problem(f"{WHERE}.offload_modules", "does nothing without fine_grained_activation_offloading", "set that")
    if fine and given.get("cpu_offloading"):
        yield Problem(
            f"{WHERE}.cpu_offloading", "and fine_grained_activation_offloading exclude each other", "choose one"
        )
    if modules and "attn_proj" in modules and "core_attn" not in modules:
        yield Problem(f"{WHERE}.offload_modules", "attn_proj needs core_attn, whose output it takes", "add core_attn")
    if not 0 <= given.get("activation_offload_fraction", 1) <= 1:
        yield Problem(f"{WHERE}.activation_offload_fraction", "must lie between 0 and 1", "correct it")


def _low_precision(policy: PolicyConfig, given: Mapping[str, Any]) -> Iterator[Problem]:
    if policy.megatron_cfg.transformer_impl == "transformer_engine" and policy.precision != "bfloat16":
        yield Problem(
            f"{WHERE}.transformer_impl",
            f"transformer_engine needs policy.precision bfloat16, which is {policy.precision}: its attention has no other",
            "set auto or local",
        )
    for name in ("fp8", "fp4"):
        if given.get(name) and policy.precision != "bfloat16":
            yield Problem(
                f"{WHERE}.{name}", f"needs policy.precision bfloat16, which is {policy.precision}", "set it to bfloat16"
            )
        if given.get(f"{name}_recipe") == "custom" and not given.get(f"{name}_quantizer_factory"):
            yield Problem(f"{WHERE}.{name}_recipe", f"custom needs {name}_quantizer_factory", "set it")
    if given.get("fp8") and given.get("fp4"):
        yield Problem(f"{WHERE}.fp4", "and fp8 exclude each other", "set one of them to null")
    recipe = given.get("fp8_recipe", "delayed")
    if given.get("fp8") and recipe == "delayed" and given.get("first_last_layers_bf16"):
        yield Problem(f"{WHERE}.first_last_layers_bf16", "does not work with fp8_recipe delayed", "set fp8_recipe")
    if given.get("fp8_output_proj") and not (given.get("fp8") and recipe == "mxfp8"):
        yield Problem(f"{WHERE}.fp8_output_proj", "needs fp8 and fp8_recipe mxfp8", "set them, or remove it")
    for name in ("fp8_recipe", "first_last_layers_bf16", "fp8_dot_product_attention", "fp8_multi_head_attention"):
        if name in given and not is_default("TransformerConfig", name, given[name]) and not given.get("fp8"):
            yield Problem(f"{WHERE}.{name}", "does nothing without fp8", f"set {WHERE}.fp8 (e4m3 or hybrid)")


def _optimizer(policy: PolicyConfig) -> Iterator[Problem]:
    where, given = f"{WHERE}.optimizer", policy.megatron_cfg.optimizer
    if not given.get("use_precision_aware_optimizer"):
        for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if given.get(name, "float32") != "float32":
                yield Problem(
                    f"{where}.{name}",
                    f"{given[name]} needs use_precision_aware_optimizer",
                    f"set {where}.use_precision_aware_optimizer to true",
                )
    elif policy.precision != "bfloat16":
        yield Problem(
            f"{where}.use_precision_aware_optimizer",
            f"needs policy.precision bfloat16, which is {policy.precision}",
            "remove it: in float32 there is nothing to save",
        )
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if given.get(name, "float32") not in ("float32", "bfloat16"):
            yield Problem(
                f"{where}.{name}",
                f"{given[name]} is scaled by shard, so that a checkpoint could not be resumed exactly",
                "set float32 or bfloat16",
            )
    fraction = given.get("optimizer_offload_fraction", 0.0)
    if not 0 <= fraction <= 1:
        yield Problem(f"{where}.optimizer_offload_fraction", f"must lie between 0 and 1, is {fraction}", "correct it")
    if given.get("optimizer_cpu_offload"):
        if fraction == 0:
            yield Problem(f"{where}.optimizer_offload_fraction", "optimizer_cpu_offload of 0 moves nothing", "set it")
        if given.get("decoupled_weight_decay") is False:
            yield Problem(
                f"{where}.decoupled_weight_decay", "optimizer_cpu_offload works with decoupled decay only", "remove it"
            )
    elif fraction:
        yield Problem(f"{where}.optimizer_offload_fraction", "does nothing without optimizer_cpu_offload", "set that")
    if given.get("decoupled_min_lr") is not None and given.get("decoupled_lr") is None:
        yield Problem(f"{where}.decoupled_min_lr", "does nothing without decoupled_lr", "set that, too")


def _gradients(given: Mapping[str, Any]) -> Iterator[Problem]:
    where = f"{WHERE}.distributed_data_parallel_config"
    if given.get("num_buckets") is not None:
        if given.get("bucket_size") is not None:
            yield Problem(f"{where}.num_buckets", "and bucket_size exclude each other", "remove one of them")
        if given["num_buckets"] < 1:
            yield Problem(f"{where}.num_buckets", f"must be at least 1, is {given['num_buckets']}", "correct it")
    if given.get("param_name_patterns_for_fp32_local_accumulation") and given.get("grad_reduce_in_fp32", True):
        yield Problem(
            f"{where}.param_name_patterns_for_fp32_local_accumulation",
            "singles out parameters, and grad_reduce_in_fp32 (true unless set) covers all",
            "remove it, or set grad_reduce_in_fp32 to false",
        )
    if given.get("reduce_scatter_with_fp32_accumulation") and given.get("grad_reduce_in_fp32", True):
        yield Problem(
            f"{where}.reduce_scatter_with_fp32_accumulation",
            "is for gradients in bfloat16, and grad_reduce_in_fp32 is true unless set",
            "remove it, or set grad_reduce_in_fp32 to false",
        )
    if given.get("disable_symmetric_registration") and not given.get("nccl_ub"):
        yield Problem(f"{where}.disable_symmetric_registration", "does nothing without nccl_ub", "remove it")


def _experts(cfg: MegatronConfig, given: Mapping[str, Any]) -> Iterator[Problem]:
    where = f"{WHERE}.moe_router_load_balancing_type"
    kinds, coefficients = given.get("moe_router_load_balancing_type"), given.get("moe_aux_loss_coeff", 0.0)
    for kind in kinds if isinstance(kinds, list) else [kinds] if kinds is not None else []:
        if kind in _NOT_BALANCED:
            yield Problem(where, f"cannot be {kind}: {_NOT_BALANCED[kind]}", "set it to none or aux_loss")
        elif kind not in ("none", "aux_loss"):
            yield Problem(where, f"should be none or aux_loss, is {kind!r}", "correct it")
    if isinstance(kinds, list) != isinstance(coefficients, list) or (
        isinstance(kinds, list) and len(kinds) != len(coefficients)
    ):
        yield Problem(where, "and moe_aux_loss_coeff must be lists of one length, or neither a list", "correct one")
    elif kinds in (None, "none") and coefficients:
        yield Problem(
            f"{WHERE}.moe_aux_loss_coeff",
            "does nothing: moe_router_load_balancing_type is none unless set",
            f"set {where} to aux_loss",
        )
    numbers = coefficients if isinstance(coefficients, list) else [coefficients]
    if any(isinstance(c, bool) or not isinstance(c, int | float) or c < 0 for c in numbers):
        yield Problem(f"{WHERE}.moe_aux_loss_coeff", f"must not be negative, is {coefficients!r}", "correct it")
    if (given.get("moe_z_loss_coeff") or 0) < 0:
        yield Problem(f"{WHERE}.moe_z_loss_coeff", "must not be negative", "correct it")
    dispatcher = given.get("moe_token_dispatcher_type")
    if dispatcher == "flex":
        yield Problem(
            f"{WHERE}.moe_token_dispatcher_type",
            "flex needs DeepEP, HybridEP or NCCL EP, and none of them is in the pinned stack",
            "set it to alltoall",
        )
    if dispatcher == "allgather":
        yield from _allgather(cfg)
    capacity = given.get("moe_expert_capacity_factor")
    if given.get("moe_pad_expert_input_to_capacity") and capacity is None:
        yield Problem(f"{WHERE}.moe_pad_expert_input_to_capacity", "needs moe_expert_capacity_factor", "set it")
    for name in ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"):
        if given.get(name) and (dispatcher == "allgather" or not (given.get("fp8") or given.get("fp4"))):
            yield Problem(f"{WHERE}.{name}", "needs fp8 or fp4, and the alltoall dispatcher", "remove it")


def _allgather(cfg: MegatronConfig) -> Iterator[Problem]:
    """It gathers equally many tokens from every rank of an expert group, and microbatches of data-parallel ranks differ
    in length; and it refuses the variable lengths that pipeline stages need to exchange."""
    where = f"{WHERE}.moe_token_dispatcher_type"
    experts = cfg.expert_model_parallel_size * cfg.expert_tensor_parallel_size
    replica = cfg.tensor_model_parallel_size * cfg.context_parallel_size
    if cfg.pipeline_model_parallel_size > 1:
        yield Problem(
            where,
            "allgather refuses sequences of different lengths between stages, and pipeline_model_parallel_size is "
            f"{cfg.pipeline_model_parallel_size}",
            "set it to alltoall",
        )
    elif replica % experts:
        yield Problem(
            where,
            f"allgather needs equally many tokens on each of the {experts} ranks that share the experts "
            f"(expert_model_parallel_size {cfg.expert_model_parallel_size} x expert_tensor_parallel_size "
            f"{cfg.expert_tensor_parallel_size}), and those go beyond one data-parallel rank "
            f"(tensor x context parallel size {replica})",
            "set it to alltoall",
        )


def _pipeline_communication(given: Mapping[str, Any]) -> Iterator[Problem]:
    virtual = given.get("virtual_pipeline_model_parallel_size")
    for name, overlapping in (("overlap_p2p_comm", True), ("batch_p2p_comm", False)):
        value = given.get(name)
        if virtual and value is (not overlapping):
            yield Problem(
                f"{WHERE}.{name}",
                f"must be {json.dumps(overlapping)} between virtual stages (virtual_pipeline_model_parallel_size "
                f"{virtual}): of two stages each is the other's next and previous",
                "remove it",
            )
    if given.get("overlap_p2p_comm") and not virtual:
        yield Problem(
            f"{WHERE}.overlap_p2p_comm", "works between virtual stages only", "set virtual_pipeline_model_parallel_size"
        )
    if given.get("overlap_p2p_comm_warmup_flush") and not virtual:
        yield Problem(
            f"{WHERE}.overlap_p2p_comm_warmup_flush",
            "works between virtual stages only",
            "set virtual_pipeline_model_parallel_size",
        )
