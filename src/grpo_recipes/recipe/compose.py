"""A recipe by name and overrides -> ResolvedRecipe: the validated recipe and where each of its values came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.catalogue import find
from grpo_recipes.recipe.digest import digest
from grpo_recipes.recipe.layers import file_layers, merge, override_layer
from grpo_recipes.recipe.leaves import leaves, unflatten
from grpo_recipes.recipe.locate import recipes_folder
from grpo_recipes.recipe.schema import Recipe
from grpo_recipes.recipe.yaml_files import dump, load_mapping

SCHEMA_DEFAULT = "schema default"
_FORMAT = 1  # of a resolved recipe file
_KEYS = ("format", "name", "version", "root", "digest", "overrides", "recipe", "origins")  # that it must have


@dataclass(frozen=True)
class ResolvedRecipe:
    name: str
    version: str  # "v1"; "unversioned" for a loose file
    recipe: Recipe
    values: dict[str, Any]  # explicitly set values only, nested, as validated
    origins: dict[str, str]  # of every leaf, by dotted path: "schema default", "base …", "recipe …" or "override"
    digest: str  # of `values`
    root: Path  # folder the recipe file lies in
    overrides: tuple[str, ...]  # as given

    def leaves(self) -> dict[str, Any]:
        """Every value by dotted path, schema defaults included."""
        return dict(leaves(self.recipe.model_dump(mode="json")))

    def to_yaml(self) -> str:
        """A file from which `load_resolved` rebuilds this object, also when schema defaults have changed since."""
        shipped = self.root.parent == recipes_folder()
        return dump(
            {
                "format": _FORMAT,
                "name": self.name,
                "version": self.version,
                "root": None if shipped else str(self.root),  # null: <recipes>/<name>, wherever that lies
                "digest": self.digest,
                "overrides": list(self.overrides),
                "recipe": self.recipe.model_dump(mode="json"),
                "origins": [
                    {"key": key, "origin": origin} for key, origin in self.origins.items() if origin != SCHEMA_DEFAULT
                ],
            }
        )


def resolve(reference: str, overrides: Sequence[str] = (), folder: Path | None = None) -> ResolvedRecipe:
    """Compose and validate NAME, NAME@vN or the path of a YAML file.

    Args:
        overrides: dotted `key=value`, applied in order after the files.
        folder: of the recipes, if not the shipped one.

    Raises:
        UserError: unknown recipe or version, a file that is not YAML, or any mistake in the values.
    """
    from grpo_recipes.recipe.schema_tree import is_text
    from grpo_recipes.recipe.validate import validate

    folder = folder or recipes_folder()
    file = find(reference, folder)
    layers = [*file_layers(file.path, folder), *(override_layer(override, is_text) for override in overrides)]
    values, set_by = merge(layers)
    recipe = validate(values, set_by, f"{file.name} {file.version}")
    return _resolved(file.name, file.version, recipe, set_by, file.path.parent, tuple(overrides))


def load_resolved(path: Path) -> ResolvedRecipe:
    """Read what `ResolvedRecipe.to_yaml` wrote.

    Raises:
        UserError: not such a file, no longer valid, or changed after it was written.
    """
    from grpo_recipes.recipe.validate import validate

    data = load_mapping(path)
    missing = [key for key in _KEYS if key not in data]
    if missing or data["format"] != _FORMAT:
        reason = f"lacks {', '.join(missing)}" if missing else f"has format {data['format']!r}, expected {_FORMAT}"
        raise UserError(f"is not a resolved recipe: {reason}", where=str(path), mend="give a file that a run wrote")
    set_by = {entry["key"]: entry["origin"] for entry in data["origins"]}
    recipe = validate(data["recipe"], set_by, str(path))
    root = Path(data["root"]) if data["root"] else recipes_folder() / data["name"]
    resolved = _resolved(data["name"], data["version"], recipe, set_by, root, tuple(data["overrides"]))
    if resolved.digest != data["digest"]:
        raise UserError(
            f"was changed after it was written: its digest is {resolved.digest[:12]}, recorded {data['digest'][:12]}",
            where=str(path),
            mend="start a new run with overrides instead of editing a run's recipe",
        )
    return resolved


def _resolved(
    name: str, version: str, recipe: Recipe, set_by: Mapping[str, str], root: Path, overrides: tuple[str, ...]
) -> ResolvedRecipe:
    every = dict(leaves(recipe.model_dump(mode="json")))
    explicit = unflatten({path: value for path, value in every.items() if path in set_by})
    origins = {path: set_by.get(path, SCHEMA_DEFAULT) for path in every}
    return ResolvedRecipe(name, version, recipe, explicit, origins, digest(explicit), root, overrides)
