"""What two runs have in common and where they part."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.recipe.leaves import leaves
from grpo_recipes.runs.folder import open_run
from grpo_recipes.runs.manifest import read_manifest
from grpo_recipes.runs.metrics import MetricsRow, read_metrics

# Command line and times of the attempts differ between any two runs and explain nothing.
SECTIONS = ("code", "software", "hardware", "seeds", "inputs", "backends")
SHOWN = 8


def diff_runs(a: str | Path, b: str | Path) -> list[str]:
    """Lines for people: differences of the manifests, then of the metrics. Raises UserError as `open_run` does."""
    folders = open_run(a), open_run(b)
    first, second = (read_manifest(folder) for folder in folders)
    lines = manifest_differences(first, second) or ["manifest: no difference"]
    return lines + metric_differences(*(read_metrics(folder.metrics_path) for folder in folders))


def manifest_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """One line per leaf: recipe values first, then everything that could explain a different number."""
    old, new = (dict(_leaves(manifest)) for manifest in (a, b))
    return [
        f"{key}: {_show(old, key)} -> {_show(new, key)}"
        for key in [*old, *(key for key in new if key not in old)]
        if old.get(key) != new.get(key) or (key in old) != (key in new)
    ]


def metric_differences(a: Sequence[MetricsRow], b: Sequence[MetricsRow]) -> list[str]:
    """Whether everything that must repeat did, bit for bit; if not, the first step that did not, largest first."""
    old, new = ({(row.step, row.kind): row.metrics for row in rows} for rows in (a, b))
    common = [key for key in old if key in new]
    lines = [
        f"metrics: {len(only)} rows only in the {which} run, the first is {_name(only[0])}"
        for which, only in (
            ("first", [key for key in old if key not in new]),
            ("second", [key for key in new if key not in old]),
        )
        if only
    ]
    if not common:
        return [*lines, "metrics: no row in common"]
    parted = [key for key in common if _changed(old[key], new[key])]
    if not parted:
        return [*lines, f"metrics: bit-identical in all {len(common)} common rows"]
    at = parted[0]
    changed = sorted(_changed(old[at], new[at]), key=lambda change: -change[3])
    lines.append(f"metrics: {len(parted)} of {len(common)} common rows differ, the first is {_name(at)}:")
    lines += [f"  {name}: {was!r} -> {now!r} (relative {ratio:.2g})" for name, was, now, ratio in changed[:SHOWN]]
    if len(changed) > SHOWN:
        lines.append(f"  and {len(changed) - SHOWN} more")
    return lines


def _leaves(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    recipe = manifest["recipe"]
    yield "recipe", f"{recipe['name']}@{recipe['version']}"
    # As JSON, so that a manifest in memory equals one that was read.
    yield from leaves(json.loads(json.dumps(recipe["full"])))
    for section in SECTIONS:
        yield from leaves(json.loads(json.dumps({section: manifest.get(section)})))


def _show(tree: Mapping[str, Any], key: str) -> str:
    return json.dumps(tree[key], ensure_ascii=False) if key in tree else "absent"


def _name(key: tuple[int, str]) -> str:
    return f"step {key[0]} ({key[1]})"


def _changed(a: Mapping[str, float], b: Mapping[str, float]) -> list[tuple[str, float | None, float | None, float]]:
    """(name, value, value, relative difference) of each metric whose bits differ; one absent differs infinitely."""
    found = []
    for name in [*a, *(name for name in b if name not in a)]:
        was, now = a.get(name), b.get(name)
        if was is None or now is None:
            found.append((name, was, now, math.inf))
        elif struct.pack("d", was) != struct.pack("d", now) and not (math.isnan(was) and math.isnan(now)):
            scale = max(abs(was), abs(now))
            ratio = abs(was - now) / scale if scale and math.isfinite(scale) else math.inf
            found.append((name, was, now, 0.0 if was == now else ratio))
    return found
