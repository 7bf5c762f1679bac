"""Questions about the schema's shape: which keys are valid at a dotted path, which type one has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from grpo_recipes.recipe.schema import Recipe


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `GRPOConfig | None`."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def section_at(path: tuple[str, ...]) -> type[BaseModel] | None:
    """The section class at a path of keys; None where the path leaves the schema or ends at a plain value."""
    section: type[BaseModel] | None = Recipe
    for key in path:
        field = section.model_fields.get(key) if section else None
        section = model_of(field.annotation) if field else None
    return section


def is_text(path: str) -> bool:
    """Whether the key holds text (`str` or `str | None`)."""
    *parents, last = path.split(".")
    section = section_at(tuple(parents))
    field = section.model_fields.get(last) if section else None
    if field is None:
        return False
    return field.annotation is str or set(get_args(field.annotation)) == {str, type(None)}


def all_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections included."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        inner = model_of(field.annotation)
        if inner:
            yield from all_keys(inner, f"{prefix}{name}.")
