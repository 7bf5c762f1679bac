"""Model families: one file each, a declarative table from Megatron's parameter names to Hugging Face's published ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_recipes.policy.hf.mapping import Rule
from grpo_recipes.recipe.architecture import check_architecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """What differs between architectures. Variants that no family covers are refused in recipe/architecture.py.

    Attributes:
        model_type: as in config.json.
        transformer_config: fields of TransformerConfig beyond those that every family shares.
        outer: parameters outside the layers; the output layer is left out of a model with tied embeddings.
        layer: parameters of one layer, names after "decoder.layers.{layer}." and "model.layers.{layer}.".
    """

    model_type: str
    transformer_config: Callable[[PretrainedConfig], dict[str, Any]]
    outer: tuple[Rule, ...]
    layer: tuple[Rule, ...]


def family_of(hf: PretrainedConfig) -> Family:
    """Raises UserError for a model that the trainer does not cover, naming what is at fault in config.json."""
    check_architecture(hf.to_dict())
    return importlib.import_module(f"grpo_recipes.policy.hf.families.{hf.model_type}").FAMILY
