"""Whose architecture is certified: a recipe's, a model folder's, or a family's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_recipes.errors import UserError
from grpo_recipes.proof.certificate.layouts import Layout, recipes_own
from grpo_recipes.recipe.layout import devices
from grpo_recipes.recipe.model_folder import model_path, read_json
from grpo_recipes.recipe.schema import MegatronConfig, PolicyConfig
from grpo_recipes.recipe.shrink import FAMILIES

# Keys of a recipe's megatron_cfg that change how something is computed, and mean the same to a small model. Others are
# sizes of the large one, or kernels that a CPU lacks.
KEPT = (
    "activation_checkpointing",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "transformer_impl",
    "cp_comm_type",
)
CUDA_ONLY = ("moe_grouped_gemm", "transformer_impl", "cp_comm_type")


@dataclass(frozen=True)
class Subject:
    name: str  # as shown
    config: dict[str, Any]  # config.json of the real model
    where: str  # of the configuration, for errors
    kept: dict[str, Any]  # of the recipe's megatron_cfg
    own: Layout | None  # the recipe's layout with its sizes reduced to 2
    digest: str | None  # of the recipe


def subject_of(name: str | None, overrides: Sequence[str], family: str | None) -> Subject:
    """Raises UserError: no such recipe, folder or family; more than one of them; a model that is not on this machine."""
    if (name is None) == (family is None):
        raise UserError(
            "give a recipe, a folder with a config.json, or --family",
            where="certify layout",
            mend="exactly one of them",
        )
    if family is not None:
        if family not in FAMILIES:
            raise UserError(f"{family!r} is not a family", where="--family", mend=f"known: {', '.join(FAMILIES)}")
        return Subject(f"family {family}", FAMILIES[family], f"family {family}", _settings(overrides), None, None)
    assert name is not None
    if Path(name).is_dir():
        return Subject(name, *_config(Path(name)), _settings(overrides), None, None)
    return _of_recipe(name, overrides)


def _settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Of a family or a folder, for which there is no recipe: only what KEPT names."""
    found = {}
    for override in overrides:
        path, _, value = override.partition("=")
        key = path.removeprefix("policy.megatron_cfg.")
        if key == path or key not in KEPT:
            raise UserError(
                "means nothing to a certificate without a recipe",
                where=override,
                mend=f"leave it out, give a recipe, or use policy.megatron_cfg.KEY=VALUE with one of {', '.join(KEPT)}",
            )
        found[key] = yaml.safe_load(value)
    try:
        MegatronConfig.model_validate(found, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{first['msg'].removeprefix('Input ')}, is {first['input']!r}",
            where=f"policy.megatron_cfg.{first['loc'][0]}",
            mend="correct it",
        ) from error
    return found


def _of_recipe(name: str, overrides: Sequence[str]) -> Subject:
    from grpo_recipes.recipe.compose import resolve

    resolved = resolve(name, overrides)
    recipe = resolved.recipe
    megatron = recipe.policy.megatron_cfg
    given = megatron.model_dump(exclude_unset=True)
    of_model = (
        megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    )
    return Subject(
        f"{resolved.name}@{resolved.version}",
        *_config(_folder(recipe.policy)),
        {key: given[key] if key != "recompute_num_layers" else 1 for key in KEPT if key in given},
        recipes_own(megatron, replicated=devices(recipe.cluster) > of_model),
        resolved.digest,
    )


def _folder(policy: PolicyConfig) -> Path:
    try:
        return model_path(policy.model_name, policy.model_revision)
    except UserError as error:
        raise UserError(
            error.message,
            where=error.where,
            mend=f"of a model only config.json is needed here: `hf download {policy.model_name} config.json`, or set "
            "policy.model_name to a folder that holds it, or certify a whole family with --family",
        ) from error


def _config(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "config.json"
    return read_json(path), str(path)
