"""The reference band: what honest runs of one recipe with different seeds looked like.

`python -m grpo_recipes.proof.band OUT RUN…` makes results/measured/<recipe>/reference.json from finished runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.leaves import leaves
from grpo_recipes.recipe.locate import measured_folder
from grpo_recipes.runs.files import read_json_object, write_atomically
from grpo_recipes.runs.folder import RunFolder, open_run
from grpo_recipes.runs.manifest import read_manifest
from grpo_recipes.runs.metrics import MetricsRow, read_metrics, series

SCHEMA_VERSION = 1
ACCURACY, REWARD, MISMATCH = "val/accuracy", "train/reward", "train/gen_kl_error"
NUM_PROBLEMS = "val/num_problems"
METRICS = (
    ACCURACY,
    "val/greedy_accuracy",
    "val/response_length_mean",
    NUM_PROBLEMS,
    REWARD,
    "train/loss",
    MISMATCH,
    "train/entropy",
    "train/grad_norm",
    "train/response_length_mean",
)
# May differ between a run and its reference: they say what is drawn, written or kept, not what is learnt.
NEUTRAL = ("description", "grpo.seed", "sft.seed", "logger.", "checkpointing.")
# Where a model or dataset lies is each machine's own affair: what it holds is compared by digest (manifest, inputs).
LOCATIONS = ("policy.model_name", "policy.tokenizer.name", "data.train.path", "data.validation.path")


@dataclass(frozen=True)
class Curve:
    """One metric of all runs of a band."""

    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]  # one row per seed, one column per step

    @property
    def mean(self) -> list[float]:
        return [sum(column) / len(column) for column in zip(*self.values, strict=True)]

    @property
    def low(self) -> list[float]:
        return [min(column) for column in zip(*self.values, strict=True)]

    @property
    def high(self) -> list[float]:
        return [max(column) for column in zip(*self.values, strict=True)]


@dataclass(frozen=True)
class Band:
    recipe: str
    version: str
    digests: tuple[str, ...]  # of the runs' recipes; they differ where the seed is part of the recipe
    full: dict[str, Any]  # every value of the recipe, nested
    seeds: tuple[int, ...]
    inputs: dict[str, Any]  # digests of model, tokenizer, chat template, data
    hardware: tuple[dict[str, Any], ...]  # each kind of machine once
    software: dict[str, Any]
    runs: tuple[dict[str, Any], ...]  # name, seed, digest, code of each run
    curves: dict[str, Curve]


def make_band(run_dirs: Sequence[str | Path]) -> Band:
    """Raises UserError if a run is unfinished or the runs differ in more than the seed."""
    folders = [open_run(path) for path in run_dirs]
    if len(folders) < 2:
        raise UserError("a band needs two runs or more", where="RUN", mend="run the recipe with other seeds")
    manifests = [read_manifest(folder) for folder in folders]
    first = manifests[0]
    for folder, manifest in zip(folders, manifests, strict=True):
        _require_same(folder, first, manifest)
    seeds = tuple(run_seed(manifest) for manifest in manifests)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"seeds repeat: {list(seeds)}", where="RUN", mend="a seed must count only once")
    machines = {json.dumps(_machine(manifest), sort_keys=True): _machine(manifest) for manifest in manifests}
    return Band(
        recipe=first["recipe"]["name"],
        version=first["recipe"]["version"],
        digests=tuple(sorted({manifest["recipe"]["digest"] for manifest in manifests})),
        full=first["recipe"]["full"],
        seeds=seeds,
        inputs=first["inputs"],
        hardware=tuple(machines.values()),
        software=first["software"],
        runs=tuple(
            {"name": f.name, "seed": s, "digest": m["recipe"]["digest"], **m["code"]}
            for f, m, s in zip(folders, manifests, seeds, strict=True)
        ),
        curves=_curves(folders, max_steps(first)),
    )


def write_band(path: Path, band: Band) -> None:
    curves = {
        name: {"steps": list(curve.steps), "values": [[float(f"{v:.6g}") for v in row] for row in curve.values]}
        for name, curve in band.curves.items()
    }
    document = {
        "schema_version": SCHEMA_VERSION,
        "recipe": {
            "name": band.recipe,
            "version": band.version,
            "digests": list(band.digests),
            "full": band.full,
        },
        "seeds": list(band.seeds),
        "hardware": list(band.hardware),
        "software": band.software,
        "inputs": band.inputs,
        "runs": list(band.runs),
    }
    head = json.dumps(document, indent=2, ensure_ascii=False).removesuffix("\n}")
    # One line per metric: rows of numbers, broken into one number a line, would bury the rest of the file.
    body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(curve)}" for name, curve in curves.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f'{head},\n  "metrics": {{\n{body}\n  }}\n}}\n')


def read_band(path: Path) -> Band:
    """Raises UserError if the file is missing, damaged or of another schema."""
    mend = "make it with `python -m grpo_recipes.proof.band OUT RUN…`"
    document = read_json_object(path, mend=mend)
    if document.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"schema version {document.get('schema_version')!r} is unknown", where=str(path), mend=mend)
    try:
        return Band(
            recipe=document["recipe"]["name"],
            version=document["recipe"]["version"],
            digests=tuple(document["recipe"]["digests"]),
            full=document["recipe"]["full"],
            seeds=tuple(document["seeds"]),
            inputs=document["inputs"],
            hardware=tuple(document["hardware"]),
            software=document["software"],
            runs=tuple(document["runs"]),
            curves={
                name: Curve(tuple(curve["steps"]), tuple(tuple(map(float, row)) for row in curve["values"]))
                for name, curve in document["metrics"].items()
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"not a reference band: {error!r}", where=str(path), mend=mend) from error


def find_band(recipe: str, folder: Path | None = None) -> Path | None:
    """The published reference of a recipe, if there is one."""
    folder = folder or measured_folder()
    path = folder / recipe / "reference.json" if folder else None
    return path if path and path.is_file() else None


def recipe_differences(reference: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Leaves in which a run's recipe differs from a reference's full values, neutral ones aside.

    A key that only the run knows is one that was added since; it counts if the run set it.
    """
    old = dict(_comparable(reference))
    new = dict(_comparable(manifest["recipe"]["full"]))
    explicit = dict(_comparable(manifest["recipe"]["explicit"]))
    changed = [(key, value, new.get(key, "absent")) for key, value in old.items() if new.get(key, "absent") != value]
    added = [(key, "absent", value) for key, value in explicit.items() if key not in old]
    return [f"{key}: {was!r} in the reference, {now!r} here" for key, was, now in changed + added]


def run_seed(manifest: Mapping[str, Any]) -> int:
    full = manifest["recipe"]["full"]
    return int((full.get("grpo") or full["sft"])["seed"])


def max_steps(manifest: Mapping[str, Any]) -> int:
    full = manifest["recipe"]["full"]
    return int((full.get("grpo") or full["sft"])["max_num_steps"])


def missing_training_steps(rows: Sequence[MetricsRow], last: int) -> list[int]:
    """Of 1 … last, those that no training row speaks of."""
    seen = {row.step for row in rows if row.kind == "train"}
    return [step for step in range(1, last + 1) if step not in seen]


def _comparable(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Leaves that matter, as JSON carries them (a tuple is a list there)."""
    plain = json.loads(json.dumps(tree))
    return ((key, value) for key, value in leaves(plain) if not key.startswith(NEUTRAL) and key not in LOCATIONS)


def _machine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return dict(manifest["hardware"])


def _require_same(folder: RunFolder, first: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    mend = "a band is made of runs that differ in nothing but the seed"
    for key in ("name", "version"):
        if manifest["recipe"][key] != first["recipe"][key]:
            raise UserError(f"another recipe {key}: {manifest['recipe'][key]}", where=str(folder.path), mend=mend)
    differences = recipe_differences(first["recipe"]["full"], manifest)
    if differences:
        raise UserError(f"another recipe: {differences[0]}", where=str(folder.path), mend=mend)
    if manifest["inputs"] != first["inputs"]:
        raise UserError("another model, tokenizer or dataset (inputs)", where=str(folder.path), mend=mend)


def _curves(folders: Sequence[RunFolder], last: int) -> dict[str, Curve]:
    runs = []
    for folder in folders:
        rows = read_metrics(folder.metrics_path)
        missing = missing_training_steps(rows, last)
        if missing:
            raise UserError(f"step {missing[0]} of {last} is missing", where=str(folder.path), mend="finish the run")
        runs.append(rows)
    curves = {name: curve for name in METRICS if (curve := _curve([_by_step(rows, name) for rows in runs]))}
    evaluated = [_by_step(rows, ACCURACY).keys() for rows in runs]
    for folder, steps in zip(folders, evaluated, strict=True):
        if steps != evaluated[0]:
            raise UserError("was evaluated at other steps", where=str(folder.path), mend="finish the run")
    return curves


def _by_step(rows: Sequence[MetricsRow], name: str) -> dict[int, float]:
    return dict(series(rows, name))


def _curve(runs: Sequence[Mapping[int, float]]) -> Curve | None:
    """Over the steps that all runs measured: a step without a loss (every group dropped) has few metrics."""
    steps = tuple(step for step in runs[0] if all(step in run for run in runs))
    return Curve(steps, tuple(tuple(run[step] for step in steps) for run in runs)) if steps else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m grpo_recipes.proof.band", description=__doc__)
    parser.add_argument("out", metavar="OUT", type=Path, help="e.g. results/measured/<recipe>/reference.json")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders of finished runs")
    options = parser.parse_args(arguments)
    try:
        write_band(options.out, make_band(options.runs))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
