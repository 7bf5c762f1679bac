"""The digest of a recipe: what its author set, independent of schema defaults, spelling and the place it runs at.

`python -m grpo_recipes.recipe.digest NAME > recipes/NAME/digests.json` records the versions of a recipe as released.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from grpo_recipes.recipe.leaves import leaves, unflatten

SCHEMA_VERSION = 1  # raise it when a key changes its meaning: that changes every digest
NOT_PART = ("logger",)  # sections that only say where a run is observed from


def canonical(values: Mapping[str, Any]) -> str:
    """Canonical JSON: sorted keys, no spaces, whole floats as integers (1.0 and 1 are the same value)."""
    kept = {key: value for key, value in values.items() if key not in NOT_PART}
    return json.dumps(
        {"schema": SCHEMA_VERSION, "values": _whole(kept)}, sort_keys=True, separators=(",", ":"), allow_nan=False
    )


def digest(values: Mapping[str, Any], without: tuple[str, ...] = ()) -> str:
    """SHA-256, in hexadecimal, of the canonical form of explicitly set values.

    Args:
        without: dotted leaves to leave out, for questions such as "the same but for the seed?".
    """
    kept = unflatten({path: value for path, value in leaves(values) if path not in without})
    return hashlib.sha256(canonical(kept).encode()).hexdigest()


def _whole(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def main() -> None:
    from grpo_recipes.recipe.catalogue import catalogue, find
    from grpo_recipes.recipe.compose import resolve

    if len(sys.argv) != 2:
        sys.exit("usage: python -m grpo_recipes.recipe.digest NAME")
    name = find(sys.argv[1]).name
    digests = {file.version: resolve(f"{name}@{file.version}").digest for file in catalogue()[name]}
    print(json.dumps(digests, indent=2))


if __name__ == "__main__":
    main()
