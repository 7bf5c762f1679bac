"""Writes recipe/megatron_fields.json: what the pinned Megatron-Core can be told. Run it again when the pin moves.

    python -m grpo_recipes.policy.megatron.field_snapshot

Recipes are checked against that file, so that a check needs neither torch nor Megatron-Core.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from importlib.metadata import version
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from grpo_recipes.recipe.field_types import entry
from grpo_recipes.recipe.megatron import FIELDS_FILE

CLASSES = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


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
    return {field.name: entry(field.type, default(field)) for field in fields}


def _arguments(function: Any) -> dict[str, Any]:
    parameters = list(inspect.signature(function).parameters.values())[2:]  # without self and optimizer
    return {p.name: entry(p.annotation, p.default) for p in parameters}


def main() -> None:
    FIELDS_FILE.write_text(json.dumps(snapshot(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
