"""Nested mappings seen as dotted leaves. A list, a scalar and an empty mapping are leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of each leaf, in the order of the tree."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def nest(path: str, value: Any) -> dict[str, Any]:
    """The tree whose only leaf is `path`."""
    return unflatten({path: value})


def get(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; KeyError if there is none."""
    value: Any = tree
    for key in path.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(path)
        value = value[key]
    return value


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with these leaves."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        at = tree
        for key in parents:
            at = at.setdefault(key, {})
        at[last] = value
    return tree
