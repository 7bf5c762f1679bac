"""policy.dtensor_cfg: what it cannot be, without torch."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_recipes.recipe.layout import devices
from grpo_recipes.recipe.megatron import is_default
from grpo_recipes.recipe.model_flops import ModelShape
from grpo_recipes.recipe.problems import Problem, nearest
from grpo_recipes.recipe.schema import DTensorConfig, MegatronConfig, Recipe

WHERE = "policy.dtensor_cfg"
# Of megatron_cfg.optimizer: what Adam of PyTorch has, too.
OPTIMIZER = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay")
# Names that Megatron-Core's or NeMo-RL's users know -> why there is nothing behind them, and what to do.
OTHER_NAMES = {
    "pipeline_parallel_size": ("layers are not split into pipeline stages", "set policy.megatron_cfg.enabled=true"),
    "expert_parallel_size": ("experts are not spread: FSDP2 shards them", "set policy.megatron_cfg.enabled=true"),
    "expert_tensor_parallel_size": ("experts are not cut", "set policy.megatron_cfg.enabled=true"),
    "custom_parallel_plan": ("the plans of the supported families are built in", "remove it"),
    "data_parallel_size": ("it is what the other sizes leave of the processes", "remove it"),
    "optimizer": ("both trainers have one optimizer", "set policy.megatron_cfg.optimizer"),
    "scheduler": ("both trainers have one schedule", "set policy.megatron_cfg.scheduler"),
    "freeze_moe_router": ("parameters are not frozen", "set policy.megatron_cfg.enabled=true"),
    "clear_cache_every_n_steps": ("unused memory stays with PyTorch's allocator", "remove it"),
}
RENAMED = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
}


def trainer_problems(recipe: Recipe) -> Iterator[Problem]:
    """Exactly one trainer is enabled."""
    megatron, dtensor = recipe.policy.megatron_cfg.enabled, recipe.policy.dtensor_cfg.enabled
    if megatron and dtensor:
        yield Problem(
            "policy.megatron_cfg.enabled, policy.dtensor_cfg.enabled",
            "are both true, and a run has one trainer",
            "set one of them to false",
        )
    if not megatron and not dtensor:
        yield Problem(
            "policy.megatron_cfg.enabled, policy.dtensor_cfg.enabled",
            "are both false, and a run needs a trainer",
            "set one of them to true",
        )


def dtensor_problems(recipe: Recipe) -> list[Problem]:
    """Everything wrong with policy.dtensor_cfg, and with the optimizer's settings where it is enabled."""
    policy = recipe.policy
    unknown = list(_unknown(policy.dtensor_cfg))
    if not policy.dtensor_cfg.enabled:
        return unknown
    return [*unknown, *_optimizer(policy.megatron_cfg), *_sizes(recipe)]


def _unknown(cfg: DTensorConfig) -> Iterator[Problem]:
    own = tuple(DTensorConfig.model_fields)
    for key in cfg.model_extra or {}:
        name = RENAMED.get(key, key)
        if name in OTHER_NAMES:
            reason, mend = OTHER_NAMES[name]
            yield Problem(f"{WHERE}.{key}", f"is not for this trainer: {reason}", mend)
            continue
        close = [name] if name in own else nearest(key, own)
        mend = f"did you mean {' or '.join(f'{WHERE}.{n}' for n in close)}?" if close else f"valid: {', '.join(own)}"
        yield Problem(f"{WHERE}.{key}", "unknown key", mend)


def _optimizer(shared: MegatronConfig) -> Iterator[Problem]:
    for key, value in shared.optimizer.items():
        if key not in OPTIMIZER and not _known_default(key, value):
            yield Problem(
                f"policy.megatron_cfg.optimizer.{key}",
                "is Megatron-Core's alone, and policy.dtensor_cfg.enabled is true",
                f"remove it; the DTensor trainer has {', '.join(OPTIMIZER)}",
            )


def _known_default(key: str, value: object) -> bool:
    try:
        return is_default("OptimizerConfig", key, value)
    except KeyError:  # no such field: reported already
        return True


def _sizes(recipe: Recipe) -> Iterator[Problem]:
    """Data parallel size is what is left: devices / (tensor x context)."""
    cfg, cluster = recipe.policy.dtensor_cfg, recipe.cluster
    key = f"cluster.{'gpus_per_node' if cluster.gpus_per_node else 'cpu_processes'}"
    if cluster.gpus_per_node and cluster.cpu_processes:
        yield Problem("cluster.cpu_processes", f"and gpus_per_node {cluster.gpus_per_node} are both set", "set one")
    if cfg.sequence_parallel and cfg.tensor_parallel_size == 1:
        yield Problem(
            f"{WHERE}.sequence_parallel",
            "splits activations over tensor parallel ranks, and tensor_parallel_size is 1",
            "set it to false",
        )
    if cfg.torch_compile and cfg.tensor_parallel_size > 1:
        yield Problem(
            f"{WHERE}.torch_compile",
            f"with tensor_parallel_size {cfg.tensor_parallel_size}: compiled layers have not been shown to agree with "
            "others there",
            "set one of them back",
        )
    model, found = cfg.tensor_parallel_size * cfg.context_parallel_size, devices(cluster)
    if found % model:
        yield Problem(
            WHERE,
            f"tensor_parallel_size {cfg.tensor_parallel_size} x context_parallel_size {cfg.context_parallel_size} need "
            f"groups of {model} processes, and cluster.num_nodes x {key} is {found}",
            f"set {key} to a multiple of {model}",
        )


def model_problems(cfg: DTensorConfig, shape: ModelShape) -> Iterator[Problem]:
    """What of a layout does not divide the model."""
    size, where = cfg.tensor_parallel_size, f"{WHERE}.tensor_parallel_size"
    if cfg.torch_compile and shape.experts:
        yield Problem(
            f"{WHERE}.torch_compile",
            "the model has experts: how many tokens one gets is known at run time only, and layers fall into pieces",
            "set it to false",
        )
    if size > 1 and shape.experts:
        yield Problem(where, f"{size}: layers with experts are not cut, FSDP2 shards them", "set it to 1")
        return
    for count, what in (
        (shape.heads, "attention heads"),
        (shape.kv_heads, "key-value heads"),
        (shape.ffn, "rows of the MLP's matrices (intermediate_size)"),
        (shape.vocab, "rows of the embedding (vocab_size)"),
    ):
        if count % size:
            yield Problem(where, f"{size} does not divide the model's {count} {what}", f"set a divisor of {count}")
