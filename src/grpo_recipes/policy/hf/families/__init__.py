"""Model families: one file each, a declarative table from Megatron's parameter names to Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.mapping import Rule

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """What differs between architectures.

    Attributes:
        model_type: as in config.json.
        transformer_config: fields of TransformerConfig beyond those that every family shares; raises UserError for
            variants of the architecture that are not covered.
        outer: parameters outside the layers; the output layer is left out of a model with tied embeddings.
        layer: parameters of one layer, names after "decoder.layers.{layer}." and "model.layers.{layer}.".
    """

    model_type: str
    transformer_config: Callable[[PretrainedConfig], dict[str, Any]]
    outer: tuple[Rule, ...]
    layer: tuple[Rule, ...]


def family_of(hf: PretrainedConfig) -> Family:
    """Raises UserError naming the known families."""
    from grpo_recipes.policy.hf.families import llama

    known = {family.model_type: family for family in (llama.FAMILY,)}
    if hf.model_type not in known:
        raise UserError(
            f"model_type {hf.model_type!r} is not supported",
            where="config.json: model_type",
            mend=f"known: {', '.join(sorted(known))}; a new one is a file in policy/hf/families",
        )
    return known[hf.model_type]
