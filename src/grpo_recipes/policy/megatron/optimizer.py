"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule, from the recipe."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import Router

from grpo_recipes.errors import UserError
from grpo_recipes.policy.megatron.config import WHERE, build
from grpo_recipes.recipe.megatron import scheduler_arguments

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.transformer import TransformerConfig

    from grpo_recipes.policy.megatron.model import BuiltModel
    from grpo_recipes.recipe.schema import PolicyConfig

# It says at every start that it computes the layout of its buffers itself, which is what is wanted.
logging.getLogger("megatron.core.distributed.distributed_data_parallel").setLevel(logging.ERROR)


def wrap_model(built: BuiltModel, policy: PolicyConfig) -> list[DistributedDataParallel]:
    """Every chunk of this rank. Gradients are summed over data-parallel ranks, never averaged (see
    calculate_per_token_loss in config.py). Routers that are frozen get no gradient and no optimizer state."""
    if policy.megatron_cfg.freeze_moe_router:
        _freeze_routers(built)
    config = ddp_config(policy)
    modules = [Float16Module(built.config, c) if built.config.bf16 else c for c in built.chunks]
    # Reductions of later chunks have nothing to overlap with, as in Megatron's own training loop.
    return [DistributedDataParallel(built.config, config, m, disable_bucketing=i > 0) for i, m in enumerate(modules)]


def ddp_config(policy: PolicyConfig) -> DistributedDataParallelConfig:
    given = policy.megatron_cfg.distributed_data_parallel_config
    values = {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,  # the trainer skips such a step instead of dying
        **given,
    }
    if policy.megatron_cfg.optimizer.get("use_distributed_optimizer") is False:
        raise UserError(
            "checkpoints are written from the distributed optimizer's shards",
            where=f"{WHERE}.optimizer.use_distributed_optimizer",
            mend="leave it out; with one data-parallel rank it costs nothing",
        )
    return build(DistributedDataParallelConfig, values, f"{WHERE}.distributed_data_parallel_config", given)


def build_optimizer(model: list[DistributedDataParallel], policy: PolicyConfig) -> MegatronOptimizer:
    config = optimizer_config(model[0].config, model[0].ddp_config, policy)
    return get_megatron_optimizer(config, model, use_gloo_process_groups=False)


def optimizer_config(
    config: TransformerConfig, ddp: DistributedDataParallelConfig, policy: PolicyConfig
) -> OptimizerConfig:
    given = policy.megatron_cfg.optimizer
    values = {
        "optimizer": "adam",
        "clip_grad": policy.max_grad_norm,
        "bf16": config.bf16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": ddp.use_distributed_optimizer,
        "overlap_param_gather": ddp.overlap_param_gather,
        "fp8_recipe": config.fp8_recipe if config.fp8 else None,
        "min_lr": 0.0,
        "store_param_remainders": False,
        **given,
    }
    return build(OptimizerConfig, values, f"{WHERE}.optimizer", given)


def _freeze_routers(built: BuiltModel) -> None:
    for chunk in built.chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                module.requires_grad_(False)


def build_scheduler(
    optimizer: MegatronOptimizer, policy: PolicyConfig, total_optimizer_steps: int
) -> OptimizerParamScheduler:
    """Counts optimizer steps. Step k, from 0, uses rate(k):

    k <= warm-up, warm-up > 0:  init + (lr - init) k / warm-up
    constant:                   lr
    linear, cosine:             min_lr + (lr - min_lr) c((k - warm-up) / (decay - warm-up)), then min_lr
                                c(x) = 1 - x, or (1 + cos pi x) / 2
    """
    arguments = scheduler_arguments(policy.megatron_cfg, total_optimizer_steps)
    try:
        return OptimizerParamScheduler(optimizer, **arguments)
    except (AssertionError, ValueError) as error:  # Megatron's own checks
        raise UserError(str(error) or "Megatron-Core refuses these values", where=f"{WHERE}.scheduler") from error


def distributed_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The parts of a chained optimizer that hold state on this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
