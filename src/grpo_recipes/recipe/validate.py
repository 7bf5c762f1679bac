"""Explicit values -> the frozen Recipe, every mistake at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from grpo_recipes.recipe.checks import recipe_problems
from grpo_recipes.recipe.dtensor import dtensor_problems
from grpo_recipes.recipe.layout import parallel_problems
from grpo_recipes.recipe.leaves import get
from grpo_recipes.recipe.megatron import megatron_problems
from grpo_recipes.recipe.megatron_combinations import setting_problems
from grpo_recipes.recipe.problems import Problem, nearest, raise_problems
from grpo_recipes.recipe.schema import MegatronConfig, Recipe
from grpo_recipes.recipe.schema_tree import all_keys, section_at
from grpo_recipes.recipe.vllm import vllm_problems


def validate(values: Mapping[str, Any], origins: Mapping[str, str], subject: str) -> Recipe:
    """The recipe. Types are strict: "8" is not a number, 1 is not true.

    Raises:
        UserError: lists every unknown key, wrong type, missing value and impossible combination.
    """
    try:
        recipe = Recipe.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        problems = [_problem(details, values, origins) for details in error.errors()]
        raise_problems([*problems, *_megatron_alone(values)], subject)
        raise
    fields = megatron_problems(recipe.policy.megatron_cfg)
    combinations = [*dtensor_problems(recipe), *([] if fields else _combinations(recipe))]
    raise_problems([*fields, *combinations, *vllm_problems(recipe.policy), *recipe_problems(recipe)], subject)
    return recipe


def _combinations(recipe: Recipe) -> list[Problem]:
    """Of policy.megatron_cfg, whose single fields are valid. A section that is not enabled says nothing."""
    if not recipe.policy.megatron_cfg.enabled:
        return []
    return [*parallel_problems(recipe), *setting_problems(recipe.policy, on_gpus=recipe.cluster.gpus_per_node > 0)]


def _megatron_alone(values: Mapping[str, Any]) -> list[Problem]:
    """Mistakes in policy.megatron_cfg of a recipe that is wrong elsewhere."""
    try:
        cfg = MegatronConfig.model_validate_json(json.dumps(get(values, "policy.megatron_cfg")), strict=True)
    except (KeyError, ValidationError):  # absent, or already among the problems
        return []
    return megatron_problems(cfg)


def _problem(details: Any, values: Mapping[str, Any], origins: Mapping[str, str]) -> Problem:
    keys = tuple(str(key) for key in details["loc"])
    where = ".".join(keys)
    if details["type"] == "extra_forbidden":
        return Problem(where, f"unknown key{_origin(where, origins)}", _advice(keys))
    if details["type"] == "missing":
        return Problem(where, "is missing", f"set it in the recipe, or as an override {where}=…")
    expected = details["msg"].removeprefix("Input ").replace("valid dictionary or instance of", "mapping of")
    try:
        found = f", is {get(values, where)!r}"
    except KeyError:  # inside a list
        found = f", is {details['input']!r}"
    close = nearest(str(details["input"]), _choices(details))
    return Problem(
        where, f"{expected}{found}{_origin(where, origins)}", f"did you mean {close[0]}?" if close else "correct it"
    )


def _origin(where: str, origins: Mapping[str, str]) -> str:
    sources = {origin for leaf, origin in origins.items() if leaf == where or leaf.startswith(f"{where}.")}
    return f" (set by {', '.join(sorted(sources))})" if sources else ""


def _choices(details: Any) -> list[str]:
    listed = details.get("ctx", {}).get("expected", "") if details["type"] == "literal_error" else ""
    return [choice.strip("'") for choice in listed.replace(" or ", ", ").split(", ")]


def _advice(keys: tuple[str, ...]) -> str:
    *parents, last = keys
    section = section_at(tuple(parents))
    valid = list(section.model_fields) if section else []
    prefix = ".".join([*parents, ""])
    close = [f"{prefix}{name}" for name in nearest(last, valid)]
    elsewhere = [path for path in all_keys() if path.rpartition(".")[2] == last]
    if close or elsewhere:
        return f"did you mean {' or '.join([*close, *elsewhere][:3])}?"
    return f"valid keys there: {', '.join(valid)}"
