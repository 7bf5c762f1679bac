"""What two recipes have not in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_recipes.recipe.compose import ResolvedRecipe

ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    path: str  # dotted
    left: Any  # ABSENT where the first recipe has no such leaf
    right: Any


def diff(left: ResolvedRecipe, right: ResolvedRecipe) -> list[Difference]:
    """The leaves, schema defaults included, whose values differ; in the order of the schema."""
    a, b = left.leaves(), right.leaves()
    paths = [*a, *(path for path in b if path not in a)]
    pairs = [Difference(path, a.get(path, ABSENT), b.get(path, ABSENT)) for path in paths]
    return [pair for pair in pairs if pair.left != pair.right]
