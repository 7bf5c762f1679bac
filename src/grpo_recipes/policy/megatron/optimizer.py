"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule, from the recipe."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.megatron import SCHEDULER_ARGUMENTS

if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from grpo_recipes.policy.megatron.model import BuiltModel
    from grpo_recipes.recipe.schema import PolicyConfig

WHERE = "policy.megatron_cfg"


def wrap_model(built: BuiltModel, policy: PolicyConfig) -> DistributedDataParallel:
    """Gradients are summed over data-parallel ranks, never averaged (see calculate_per_token_loss in model.py)."""
    module: torch.nn.Module = built.module
    if built.config.bf16:
        module = Float16Module(built.config, module)
    values = {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,  # the trainer skips such a step instead of dying
        **policy.megatron_cfg.distributed_data_parallel_config,
    }
    section = f"{WHERE}.distributed_data_parallel_config"
    config = _build(DistributedDataParallelConfig, values, section)
    if config.average_in_collective:
        raise UserError(
            "gradients are summed here, never averaged", where=f"{section}.average_in_collective", mend="set false"
        )
    return DistributedDataParallel(built.config, config, module)


def build_optimizer(model: DistributedDataParallel, policy: PolicyConfig) -> MegatronOptimizer:
    config = model.config
    values = {
        "optimizer": "adam",
        "lr": 1e-6,
        "weight_decay": 0.01,
        "clip_grad": policy.max_grad_norm,
        "bf16": config.bf16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": model.ddp_config.use_distributed_optimizer,
        "overlap_param_gather": model.ddp_config.overlap_param_gather,
        **policy.megatron_cfg.optimizer,
    }
    values.setdefault("min_lr", 0.0)
    return get_megatron_optimizer(_build(OptimizerConfig, values, f"{WHERE}.optimizer"), [model])


def build_scheduler(
    optimizer: MegatronOptimizer, policy: PolicyConfig, total_optimizer_steps: int
) -> OptimizerParamScheduler:
    """Counts optimizer steps. Step k, from 0, uses rate(k):

    k <= warm-up, warm-up > 0:  init_lr + (lr - init_lr) k / warm-up
    constant:                   lr
    linear, cosine:             min_lr + (lr - min_lr) c((k - warm-up) / (decay - warm-up)), then min_lr
                                c(x) = 1 - x, or (1 + cos pi x) / 2
    """
    config = optimizer.config
    values: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        "lr_warmup_steps": 0,
        "lr_decay_steps": total_optimizer_steps,
        "lr_decay_style": "constant",
        "start_wd": config.weight_decay,
        "end_wd": config.weight_decay,
        "wd_incr_steps": total_optimizer_steps,
        "wd_incr_style": "constant",
    }
    section = f"{WHERE}.scheduler"
    given = {name: value for name, value in policy.megatron_cfg.scheduler.items() if value is not None}
    _refuse_unknown(given, set(SCHEDULER_ARGUMENTS), section)
    values |= {SCHEDULER_ARGUMENTS[name]: value for name, value in given.items()}
    if values["lr_warmup_steps"] >= values["lr_decay_steps"]:
        raise UserError(
            f"warm-up of {values['lr_warmup_steps']} steps is not shorter than the {values['lr_decay_steps']} of the decay",
            where=f"{section}.lr_warmup_iters",
            mend="shorten it, or lengthen lr_decay_iters (by default the run's optimizer steps)",
        )
    try:
        return OptimizerParamScheduler(optimizer, **values)
    except (AssertionError, ValueError) as error:
        raise UserError(str(error) or "Megatron-Core refuses these values", where=section) from error


def distributed_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The parts of a chained optimizer that hold state on this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _build(kind: type, values: dict[str, Any], section: str) -> Any:
    _refuse_unknown(values, {f.name for f in dataclasses.fields(kind)}, section)
    try:
        return kind(**values)
    except (AssertionError, ValueError) as error:
        raise UserError(str(error) or "Megatron-Core refuses these values", where=section) from error


def _refuse_unknown(values: dict[str, Any], known: set[str], section: str) -> None:
    for key in values:
        if key not in known:
            raise UserError(f"Megatron-Core knows no {key!r} here", where=f"{section}.{key}")
