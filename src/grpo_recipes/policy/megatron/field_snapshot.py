"""Writes recipe/megatron_fields.json: what the pinned Megatron-Core can be told. Run it again when the pin moves.

    python -m grpo_recipes.policy.megatron.field_snapshot

Recipes are checked against that file, so that a check needs neither torch nor Megatron-Core.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import types
from importlib.metadata import version
from typing import Any, Literal, Union, get_args, get_origin

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from grpo_recipes.recipe.megatron import FIELDS_FILE

CLASSES = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
_PLAIN = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null", list: "list", tuple: "list"}


def snapshot() -> dict[str, Any]:
    """{"megatron_core": version, class name: {field: {type, default, accepts, choices}}}.

    accepts: what YAML may say: int, float, bool, str, list, null, dtype (a torch dtype by name). Empty for callables
    and other objects. choices: the admissible texts or numbers of a Literal or an enum (by name), else null.
    """
    return {
        "megatron_core": version("megatron-core"),  # its own __version__ adds the commit of the working folder
        **{cls.__name__: _dataclass_fields(cls) for cls in CLASSES},
        OptimizerParamScheduler.__name__: _arguments(OptimizerParamScheduler.__init__),
    }


def _dataclass_fields(cls: type) -> dict[str, Any]:
    def default(field: dataclasses.Field) -> Any:
        return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

    fields = [field for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]
    return {field.name: _entry(field.type, default(field)) for field in fields}


def _arguments(function: Any) -> dict[str, Any]:
    parameters = list(inspect.signature(function).parameters.values())[2:]  # without self and optimizer
    return {p.name: _entry(p.annotation, p.default) for p in parameters}


def _entry(annotation: Any, default: Any) -> dict[str, Any]:
    choices = sorted(_choices(annotation), key=str)
    accepts = sorted(_accepts(annotation) | ({"null"} if default is None else set()))
    required = default in (dataclasses.MISSING, inspect.Parameter.empty)
    shown = "required" if required else f"function {default.__name__}" if callable(default) else repr(default)
    return {"type": _type_name(annotation), "default": shown, "accepts": accepts, "choices": choices or None}


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _accepts(annotation: Any) -> set[str]:
    origin = get_origin(annotation)
    if annotation in _PLAIN or origin in (list, tuple):
        return {_PLAIN[origin or annotation]}
    if annotation is torch.dtype:
        return {"dtype"}
    if origin is Literal:
        return {_PLAIN[type(choice)] for choice in get_args(annotation)}
    if origin in (Union, types.UnionType):
        return set().union(*(_accepts(member) for member in get_args(annotation)))
    return {"str"} if isinstance(annotation, type) and issubclass(annotation, enum.Enum) else set()


def _choices(annotation: Any) -> set[Any]:
    """Empty where any text of a union is admissible."""
    origin = get_origin(annotation)
    if origin is Literal:
        return set(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return set(annotation.__members__)
    if origin in (Union, types.UnionType) and str not in get_args(annotation):
        return set().union(*(_choices(member) for member in get_args(annotation)))
    return set()


def main() -> None:
    FIELDS_FILE.write_text(json.dumps(snapshot(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
