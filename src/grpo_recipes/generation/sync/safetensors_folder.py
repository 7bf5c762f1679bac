"""Refit through a folder: the trainer writes each bucket as a safetensors file, the sampler reads them back.

The slowest transport and the one that works between any two processes of a machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_recipes.generation.sync.contract import RefitError

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_recipes.policy.contract import WeightSpec

PLAN = "plan.json"  # {name: shape}; written last, so that a folder without it is known to be incomplete
SHOWN = 3  # tensors that an error names


def write_folder(
    folder: Path, plan: Sequence[WeightSpec], buckets: Iterator[dict[str, Tensor]], *, writes: bool = True
) -> int:
    """Write every bucket into an existing empty folder; returns the bytes of the tensors written.

    Collective where `buckets` is: every rank reads them all, the one with `writes` writes.

    Raises:
        OSError: the disk is full.
        safetensors.SafetensorError: as above, from its own writer.
    """
    from safetensors.torch import save_file

    written = 0
    for number, bucket in enumerate(buckets):
        if not writes:
            continue
        # Cloned: tensors of a bucket may be views of one storage, which save_file refuses.
        tensors = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in bucket.items()}
        save_file(tensors, folder / f"{number:05}.safetensors")
        written += sum(tensor.nbytes for tensor in tensors.values())
    if writes:
        text = json.dumps({spec.name: list(spec.shape) for spec in plan})
        (folder / PLAN).write_text(text, encoding="utf-8")
    return written


def check_folder(folder: Path) -> None:
    """A loader keeps its old values of a tensor that is not there, and says nothing: so nothing may be missing.

    Raises:
        RefitError: names tensors that are missing, not expected, or of another shape.
    """
    from safetensors import safe_open

    if not (folder / PLAN).is_file():
        raise RefitError(f"{folder}: weights are incomplete: {PLAN} is missing")
    wanted: dict[str, list[int]] = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in found:
                    raise RefitError(f"{folder}: {name} was written twice")
                found[name] = list(file.get_slice(name).get_shape())
    faults = [
        *(f"{name} is missing" for name in wanted if name not in found),
        *(f"{name} is not of the plan" for name in found if name not in wanted),
        *(
            f"{name} has shape {found[name]} and not {shape}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ),
    ]
    if faults:
        more = f" (and {len(faults) - SHOWN} more)" if len(faults) > SHOWN else ""
        raise RefitError(f"{folder}: {'; '.join(faults[:SHOWN])}{more}")
