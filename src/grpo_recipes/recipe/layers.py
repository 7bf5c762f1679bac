"""What a recipe file says, layer upon layer: its `defaults`, the file itself, the overrides. Not yet validated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.leaves import get, leaves, nest
from grpo_recipes.recipe.problems import nearest
from grpo_recipes.recipe.yaml_files import load_mapping, parse

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True)
class Layer:
    origin: str  # "base <file>", "recipe <file>" or "override"
    values: dict[str, Any]


def file_layers(path: Path, folder: Path) -> list[Layer]:
    """The layers of a file, its `defaults` (paths relative to it) first. `folder`: of the recipes, for short labels.

    Raises:
        UserError: a file is missing, is not YAML, includes itself, or uses interpolation.
    """
    return _file_layers(path.resolve(), "recipe", folder, ())


def _file_layers(path: Path, kind: str, folder: Path, above: tuple[Path, ...]) -> list[Layer]:
    values = load_mapping(path)
    defaults = values.pop("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(entry, str) for entry in defaults):
        raise UserError(
            "defaults must be a list of relative paths", where=str(path), mend="defaults: [../_base/x.yaml]"
        )
    for leaf, value in leaves(values):
        _refuse_strange(value, f"{leaf} in {path}")
    bases = [_base(path, entry, (*above, path)) for entry in defaults]
    below = [layer for base in bases for layer in _file_layers(base, "base", folder, (*above, path))]
    return [*below, Layer(f"{kind} {_label(path, folder)}", values)]


def _base(path: Path, entry: str, above: tuple[Path, ...]) -> Path:
    """The file that an entry of `defaults` in `path` names."""
    base = (path.parent / entry).resolve()
    if base in above:
        raise UserError(f"defaults come back to {entry}", where=str(path), mend="break the circle")
    if not base.is_file():
        siblings = [p.name for p in base.parent.glob("*.yaml")] if base.parent.is_dir() else []
        close = nearest(base.name, siblings) or siblings
        mend = f"did you mean {' or '.join(close)}?" if close else "paths are relative to this file"
        raise UserError(f"defaults name {entry}, which does not exist", where=str(path), mend=mend)
    return base


def _label(path: Path, folder: Path) -> str:
    folder = folder.resolve()
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()


def override_layer(override: str, is_text: Callable[[str], bool]) -> Layer:
    """The layer of one `key=value`.

    A text key takes what stands after the first "=" as it is, except null and quoted YAML; any other key takes it as
    YAML. A mapping is merged into what is there.

    Raises:
        UserError: no "=", not a dotted key, not YAML, or interpolation.
    """
    key, equals, text = override.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise UserError(
            "is not an override of the form key=value", where=repr(override), mend="for example grpo.seed=7"
        )
    plain_text = is_text(key) and text not in ("null", "~") and not _is_quoted(text)
    value = text if plain_text else parse(text, key)
    _refuse_strange(value, key)
    return Layer("override", nest(key, value))


def _is_quoted(text: str) -> bool:
    """Whether the whole text is one YAML string in quotes."""
    try:
        return text[:1] in ("'", '"') and text[-1:] == text[:1] and isinstance(parse(text, ""), str)
    except UserError:
        return False


def _refuse_strange(value: Any, where: str) -> None:
    """Interpolation, OmegaConf's mark for a missing value, and YAML tags have no place in a recipe."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_strange(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for inner in value:
            _refuse_strange(inner, where)
    elif isinstance(value, str) and "${" in value:
        raise UserError(f"interpolation is not available: {value!r}", where=where, mend="write the value out")
    elif value == "???":
        raise UserError("??? stands for a missing value", where=where, mend="write the value, or leave the key out")
    elif isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        raise UserError(f"is not valid UTF-8: {value!r}", where=where, mend="give text in UTF-8")
    elif not (value is None or isinstance(value, str | int | float | bool)):
        raise UserError(f"a recipe cannot hold a {type(value).__name__}", where=where, mend="write text or a number")


def merge(layers: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """The merged tree, later layers over earlier ones, and for each of its leaves the origin of the last that set it.

    Mappings merge key by key; lists and scalars replace.
    """
    from omegaconf import OmegaConf

    _refuse_clashes(layers)
    # unsafe_merge is the faster one: it may change its inputs, which nobody else holds.
    merged: Any = OmegaConf.to_container(OmegaConf.unsafe_merge(*(OmegaConf.create(layer.values) for layer in layers)))
    set_by = {leaf: layer.origin for layer in layers for leaf, _ in leaves(layer.values)}
    return merged, {leaf: set_by[leaf] for leaf, _ in leaves(merged)}


def _refuse_clashes(layers: Sequence[Layer]) -> None:
    """A list and a mapping of the same path cannot be merged."""
    found = [leaf for layer in layers for leaf in leaves(layer.values)]
    lists = {path for path, value in found if isinstance(value, list)}
    within = {path[: dot.start()] for path, _ in found for dot in re.finditer(r"\.", path)}
    clashes = lists & (within | {path for path, value in found if isinstance(value, dict)})
    if clashes:
        raise UserError("is given a list and a mapping", where=min(clashes), mend="give the kind that it had before")


def last(layers: Sequence[Layer], path: str, default: Any = None) -> Any:
    """The value of one leaf after merging, without merging."""
    for layer in reversed(layers):
        try:
            return get(layer.values, path)
        except KeyError:
            continue
    return default
