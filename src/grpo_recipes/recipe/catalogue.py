"""The recipes that exist: recipes/<name>/v<N>.yaml. Knows nothing of what is in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.locate import recipes_folder
from grpo_recipes.recipe.problems import nearest

_VERSION = re.compile(r"v(\d+)")


@dataclass(frozen=True)
class RecipeFile:
    name: str
    version: str  # "v1"; "unversioned" for a file that does not lie at <name>/v<N>.yaml
    path: Path


def catalogue(folder: Path | None = None) -> dict[str, list[RecipeFile]]:
    """Every recipe by name, versions in ascending order. Folders that start with "_" are shared parts."""
    folder = folder or recipes_folder()
    found = {}
    for recipe in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))):
        files = [RecipeFile(recipe.name, file.stem, file) for file in recipe.glob("v*.yaml") if _number(file.stem)]
        if files:
            found[recipe.name] = sorted(files, key=lambda file: _number(file.version))
    return found


def find(reference: str, folder: Path | None = None) -> RecipeFile:
    """The file that NAME, NAME@vN or the path of a YAML file stands for; NAME alone means its newest version.

    Raises:
        UserError: no such recipe, version or file; names the nearest.
    """
    if reference.endswith((".yaml", ".yml")):
        return _file(Path(reference))
    recipes = catalogue(folder)
    name, at, version = reference.partition("@")
    if name not in recipes:
        close = nearest(name, recipes)
        mend = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(recipes)}"
        raise UserError(f"no recipe is called {name!r}", where="recipe", mend=mend)
    if not at:
        return recipes[name][-1]
    for file in recipes[name]:
        if file.version == version:
            return file
    versions = ", ".join(file.version for file in recipes[name])
    raise UserError(f"{name} has no version {version!r}", where="recipe", mend=f"choose one of {versions}")


def _file(path: Path) -> RecipeFile:
    if not path.is_file():
        close = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else [])
        mend = f"did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else "check the path"
        raise UserError("no such recipe file", where=str(path), mend=mend)
    path = path.resolve()
    if _number(path.stem):
        return RecipeFile(path.parent.name, path.stem, path)
    return RecipeFile(path.stem, "unversioned", path)


def _number(version: str) -> int:
    match = _VERSION.fullmatch(version)
    return int(match[1]) if match else 0
