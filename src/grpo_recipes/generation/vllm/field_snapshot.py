"""Writes recipe/vllm_fields.json: what the pinned vLLM's engine can be told. Run it again when the pin moves.

    python -m grpo_recipes.generation.vllm.field_snapshot

Recipes are checked against that file, so that a check needs neither torch nor vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from grpo_recipes.generation.vllm.arguments import installed
from grpo_recipes.recipe.field_types import entry
from grpo_recipes.recipe.vllm import FIELDS_FILE


def snapshot() -> dict[str, Any]:
    """{"vllm": version, "AsyncEngineArgs": {field: {type, default, accepts, choices}}}; see recipe.field_types.entry."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    # vLLM imports the name of one annotation for type checkers only.
    hints = get_type_hints(AsyncEngineArgs, localns={"QuantizationConfigArgs": dict}, include_extras=True)
    fields = {field.name: _entry(hints[field.name], field) for field in dataclasses.fields(AsyncEngineArgs)}
    return {"vllm": installed()[1], "AsyncEngineArgs": dict(sorted(fields.items()))}


def _entry(annotation: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    made = field.default_factory is not dataclasses.MISSING
    found = entry(annotation, None if made else field.default)
    if made:
        found["default"] = "made by vLLM"
        found["accepts"] = [kind for kind in found["accepts"] if kind != "null"]
    if re.search(r"\bdict\b|Config\b", found["type"]):  # vLLM makes the object of a mapping
        found["accepts"] = sorted({*found["accepts"], "mapping"})
    return found


def main() -> None:
    FIELDS_FILE.write_text(json.dumps(snapshot(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
