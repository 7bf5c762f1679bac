"""policy.megatron_cfg against the snapshot of Megatron-Core's own fields (megatron_fields.json, written by
policy/megatron/field_snapshot.py).

Where each key goes:

    megatron_cfg.<field>                            TransformerConfig
    megatron_cfg.optimizer.<field>                  OptimizerConfig
    megatron_cfg.distributed_data_parallel_config   DistributedDataParallelConfig
    megatron_cfg.scheduler.<name>                   OptimizerParamScheduler, by the names in SCHEDULER_ARGUMENTS

A field of type torch.dtype is written by its torch name ("float32"), a field that is an enum by its member's name.
Which fields a recipe cannot set, and why, is in megatron_limits.py.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from grpo_recipes.recipe.field_types import type_problems
from grpo_recipes.recipe.megatron_limits import DERIVED, FIXED, OTHER_NAMES, REFUSED
from grpo_recipes.recipe.problems import Problem, nearest
from grpo_recipes.recipe.schema import MegatronConfig

FIELDS_FILE = Path(__file__).with_name("megatron_fields.json")

# Name in a recipe (NeMo-RL's) -> argument of OptimizerParamScheduler. The unit of the *_iters is the optimizer step.
SCHEDULER_ARGUMENTS = {
    "lr_decay_style": "lr_decay_style",
    "lr_decay_iters": "lr_decay_steps",
    "lr_warmup_iters": "lr_warmup_steps",
    "lr_warmup_init": "init_lr",
    "lr_wsd_decay_style": "lr_wsd_decay_style",
    "lr_wsd_decay_iters": "wsd_decay_steps",
    "start_weight_decay": "start_wd",
    "end_weight_decay": "end_wd",
    "weight_decay_incr_style": "wd_incr_style",
}
_STYLES = {
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "lr_wsd_decay_style": ("linear", "cosine", "exponential", "minus_sqrt"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
}


@cache
def fields() -> dict[str, dict[str, Any]]:
    """{class name: {field: {type, default, accepts, choices}}} of the pinned Megatron-Core."""
    snapshot = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    return {name: entries for name, entries in snapshot.items() if name != "megatron_core"}


def default_of(class_name: str, field: str) -> Any:
    """Megatron-Core's default as a recipe would write it; None where YAML has no such value."""
    shown = fields()[class_name][field]["default"]
    if shown.startswith("<"):  # an enum's member: <AttnBackend.auto: 5>
        return shown[1:].partition(":")[0].rpartition(".")[2]
    if shown.startswith("torch."):
        return shown.removeprefix("torch.")
    if shown in ("inf", "required") or shown.startswith("function "):
        return None
    value = ast.literal_eval(shown)
    return list(value) if isinstance(value, tuple) else value


def is_default(class_name: str, field: str, value: Any) -> bool:
    """Whether a value says no more than leaving the field out."""
    default = default_of(class_name, field)
    return value == default or (value in (None, False, 0, []) and default in (None, False, 0, "none", "full"))


def given_fields(cfg: MegatronConfig) -> dict[str, Any]:
    """The fields of TransformerConfig that a validated recipe sets beside those that MegatronConfig names itself."""
    return {key: value for key, value in (cfg.model_extra or {}).items() if key not in OTHER_NAMES}


def megatron_problems(cfg: MegatronConfig) -> list[Problem]:
    """Every key that is no field, cannot be set, or has a value of the wrong type; and a schedule that Megatron-Core
    would refuse."""
    where = "policy.megatron_cfg"
    ddp = "distributed_data_parallel_config"
    problems = [
        *_other_names(where, cfg.model_extra or {}),
        *_section(where, "TransformerConfig", given_fields(cfg), tuple(MegatronConfig.model_fields)),
        *_section(f"{where}.optimizer", "OptimizerConfig", cfg.optimizer),
        *_section(f"{where}.{ddp}", "DistributedDataParallelConfig", cfg.distributed_data_parallel_config),
        *_scheduler_keys(f"{where}.scheduler", cfg.scheduler),
    ]
    return problems or list(_schedule(where, cfg))


def _other_names(where: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    for key in given.keys() & OTHER_NAMES.keys():
        value = given[key]
        off = value in (None, False) or (isinstance(value, Mapping) and value.get("enabled", True) is False)
        if not off:
            reason, mend = OTHER_NAMES[key]
            yield Problem(f"{where}.{key}", f"means nothing here: {reason}", mend)


def _section(where: str, class_name: str, given: Mapping[str, Any], own: tuple[str, ...] = ()) -> Iterator[Problem]:
    known, derived, refused = fields()[class_name], DERIVED[class_name], REFUSED[class_name]
    for key, value in given.items():
        path = f"{where}.{key}"
        if key in derived:
            yield Problem(path, f"cannot be set: {derived[key]}", "remove it")
        elif key in FIXED and value != FIXED[key][0]:
            yield Problem(path, f"can only be {json.dumps(FIXED[key][0])}: {FIXED[key][1]}", "remove it")
        elif key not in known:
            close = nearest(key, [*own, *(name for name in known if name not in derived and name not in refused)])
            mend = (
                f"did you mean {' or '.join(f'{where}.{name}' for name in close)}?" if close else _lost(key, class_name)
            )
            yield Problem(path, f"is not a field of Megatron-Core's {class_name}", mend)
        elif not known[key]["accepts"] or known[key]["accepts"] == ["null"]:
            yield Problem(path, f"is a {known[key]['type']}, which a recipe cannot express", "remove it")
        elif key in refused:
            if not is_default(class_name, key, value):
                yield Problem(path, f"cannot be {json.dumps(value)}: {refused[key]}", "remove it")
        else:
            yield from type_problems(path, value, known[key]["accepts"], known[key]["choices"])


def _lost(key: str, class_name: str) -> str:
    """Where else the key would be valid."""
    names = {
        "TransformerConfig": "policy.megatron_cfg",
        "OptimizerConfig": "policy.megatron_cfg.optimizer",
        "DistributedDataParallelConfig": "policy.megatron_cfg.distributed_data_parallel_config",
    }
    homes = [f"{home}.{key}" for other, home in names.items() if other != class_name and key in fields()[other]]
    return f"did you mean {' or '.join(homes)}?" if homes else "remove it"


def _scheduler_keys(where: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    known = fields()["OptimizerParamScheduler"]
    for key, value in given.items():
        if key == "lr_decay_iters" and value is None:  # the length of the run
            continue
        if key in SCHEDULER_ARGUMENTS:
            yield from type_problems(
                f"{where}.{key}", value, known[SCHEDULER_ARGUMENTS[key]]["accepts"], _STYLES.get(key)
            )
            continue
        renamed = [name for name, argument in SCHEDULER_ARGUMENTS.items() if argument == key]
        close = renamed or nearest(key, SCHEDULER_ARGUMENTS)
        if key in ("max_lr", "min_lr"):
            mend = f"set policy.megatron_cfg.optimizer.{key.replace('max_', '')}"
        elif key in DERIVED["OptimizerParamScheduler"]:
            yield Problem(f"{where}.{key}", f"cannot be set: {DERIVED['OptimizerParamScheduler'][key]}", "remove it")
            continue
        elif close:
            mend = f"did you mean {' or '.join(f'{where}.{name}' for name in close)}?"
        else:
            mend = f"valid keys there: {', '.join(SCHEDULER_ARGUMENTS)}"
        yield Problem(f"{where}.{key}", "is not a setting of the learning-rate schedule", mend)


def _schedule(where: str, cfg: MegatronConfig) -> Iterator[Problem]:
    """What OptimizerParamScheduler asserts when it is built."""
    optimizer, scheduler = cfg.optimizer, cfg.scheduler
    lr = optimizer.get("lr")
    if lr is None or lr <= 0:
        yield Problem(f"{where}.optimizer.lr", f"the learning rate must be greater than 0, is {lr!r}", "set it")
        return
    for name in ("min_lr", "weight_decay"):
        if (optimizer.get(name) or 0) < 0:
            yield Problem(f"{where}.optimizer.{name}", f"must not be negative, is {optimizer[name]!r}", "correct it")
    if (optimizer.get("min_lr") or 0) > lr:
        yield Problem(f"{where}.optimizer.min_lr", f"{optimizer['min_lr']} exceeds lr {lr}", "lower it")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= optimizer.get(name, 0) < 1:
            yield Problem(f"{where}.optimizer.{name}", f"must lie in [0, 1), is {optimizer[name]!r}", "correct it")
    if not 0 <= scheduler.get("lr_warmup_init", 0) <= lr:
        yield Problem(
            f"{where}.scheduler.lr_warmup_init",
            f"must lie between 0 and optimizer.lr {lr}, is {scheduler['lr_warmup_init']!r}",
            "correct it",
        )
    yield from _schedule_lengths(f"{where}.scheduler", scheduler)
    if not {"start_weight_decay", "end_weight_decay"} & scheduler.keys():
        return
    start = scheduler.get("start_weight_decay", optimizer.get("weight_decay", 0.01))
    end = scheduler.get("end_weight_decay", start)
    if not 0 <= start <= end or (start != end and scheduler.get("weight_decay_incr_style", "constant") == "constant"):
        yield Problem(
            f"{where}.scheduler.end_weight_decay",
            f"weight decay goes from {start} to {end}: it may only rise, and only with weight_decay_incr_style "
            "linear or cosine",
            "make both equal, or set weight_decay_incr_style",
        )


def _schedule_lengths(where: str, scheduler: Mapping[str, Any]) -> Iterator[Problem]:
    decay, warmup = scheduler.get("lr_decay_iters"), scheduler.get("lr_warmup_iters", 0)
    if warmup < 0:
        yield Problem(f"{where}.lr_warmup_iters", f"must not be negative, is {warmup}", "correct it")
    if decay is not None and warmup >= decay:
        yield Problem(
            f"{where}.lr_warmup_iters",
            f"{warmup} optimizer steps of warm-up leave nothing of lr_decay_iters {decay}",
            "lr_decay_iters counts from the first step, warm-up included: raise it",
        )
    if scheduler.get("lr_decay_style") == "WSD":
        for name in ("lr_wsd_decay_iters", "lr_wsd_decay_style"):
            if scheduler.get(name) is None:
                yield Problem(f"{where}.{name}", "is missing: lr_decay_style WSD needs it", "set it")


def scheduler_arguments(cfg: MegatronConfig, total_steps: int) -> dict[str, Any]:
    """Keyword arguments of Megatron-Core's OptimizerParamScheduler, all but `optimizer`, from a validated config.

    Args:
        total_steps: optimizer steps of the whole run; the length of decay where lr_decay_iters is not set.

    Unset keys mean: constant rate, no warm-up, min_lr 0, constant weight decay (Megatron-Core's 0.01 unless set).
    Call its `step(1)` once per optimizer step.
    """
    optimizer, given = cfg.optimizer, cfg.scheduler
    weight_decay = optimizer.get("weight_decay", 0.01)
    warmup = given.get("lr_warmup_iters", 0)
    arguments = {
        "lr_decay_style": "constant",
        "lr_decay_steps": max(total_steps, warmup + 1),
        "lr_warmup_steps": warmup,
        "init_lr": 0.0,
        "start_wd": weight_decay,
        "end_wd": given.get("start_weight_decay", weight_decay),
        "wd_incr_style": "constant",
        **{SCHEDULER_ARGUMENTS[key]: value for key, value in given.items() if value is not None},
    }
    return {
        "max_lr": optimizer["lr"],
        "min_lr": optimizer.get("min_lr") or 0.0,
        "wd_incr_steps": max(total_steps, 1),
        **arguments,
    }
