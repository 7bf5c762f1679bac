"""One line of `nemo-run recipes`: what a recipe needs and what was measured with it. Does not validate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.recipe.catalogue import RecipeFile
from grpo_recipes.recipe.layers import file_layers, last
from grpo_recipes.recipe.locate import measured_folder, recipes_folder


@dataclass(frozen=True)
class Entry:
    model: str
    data: str
    devices: str
    evidence: str


def entry(file: RecipeFile) -> Entry:
    layers = file_layers(file.path, recipes_folder())
    random = last(layers, "policy.initial_weights") == "random"
    return Entry(
        model=f"{last(layers, 'policy.model_name', '?')}{' (random)' if random else ''}",
        data=str(last(layers, "data.train.task") or last(layers, "data.train.path") or "?"),
        devices=_devices(last(layers, "cluster.num_nodes", 1), last(layers, "cluster.gpus_per_node", 0)),
        evidence=evidence(file.name, measured_folder()),
    )


def _devices(nodes: int, gpus: int) -> str:
    if not gpus:
        return "1 CPU process"
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" if nodes == 1 else f"{nodes} x {gpus} GPUs"


def evidence(name: str, measured: Path | None) -> str:
    """What results/measured/<recipe>/<hardware>/<run>/ holds: runs per kind of hardware, and whether a band exists."""
    folder = measured / name if measured else None
    if folder is None or not folder.is_dir():
        return "none"
    parts = []
    for hardware in sorted(path for path in folder.iterdir() if path.is_dir()):
        count = sum(1 for run in hardware.iterdir() if (run / "manifest.json").is_file())
        if count:
            parts.append(f"{count} run{'s' if count > 1 else ''} on {hardware.name}")
    if (folder / "reference.json").is_file():
        parts.append("reference band")
    return ", ".join(parts) or "none"
