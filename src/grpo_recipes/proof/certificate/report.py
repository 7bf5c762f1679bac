"""A certificate as a table for the terminal, and as a file that holds every tensor's differences."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.proof.certificate.certify import Certificate
from grpo_recipes.proof.certificate.verdict import Row
from grpo_recipes.runs.files import write_atomically
from grpo_recipes.runs.manifest import code_state, machine, package_versions

if TYPE_CHECKING:
    from rich.table import Table

FILE = "certificate.json"
FORMAT = 1
REFERENCE = "Hugging Face transformers in float64, each sequence alone, torch AdamW"


def heading(certificate: Certificate) -> str:
    plan, config = certificate.plan, certificate.plan.config
    return (
        f"{plan.subject.name} shrunk to {config['num_hidden_layers']} layers, hidden size {config['hidden_size']}, "
        f"{config['num_attention_heads']} heads over {config['num_key_value_heads']}, {config['vocab_size']} words; "
        f"{plan.precision} on {plan.device}, against {REFERENCE}"
    )


def table(certificate: Certificate) -> Table:
    """A row for each layout and cut; the last but one holds what is allowed."""
    from rich.table import Table

    allowed = certificate.allowed
    found = Table(title=heading(certificate), title_justify="left")
    for name in ("layout", "processes", "sequences"):
        found.add_column(name, no_wrap=True)
    for name in ("loss", "logprob", "grad norm", "gradient, worst tensor", "weight after 3 steps, worst tensor"):
        found.add_column(name, overflow="fold")
    found.add_column("verdict", no_wrap=True)
    found.add_column("s", justify="right")
    for row in certificate.rows:
        found.add_row(*_cells(row), end_section=row.cut == "unpacked")
    limits = (allowed.loss, allowed.logprob, allowed.grad_norm, allowed.gradient, allowed.weight)
    found.add_row("allowed", "", "", *(f"{limit:g}" for limit in limits), "", "")
    return found


def _cells(row: Row) -> Iterator[str]:
    yield from (row.layout, str(row.processes), row.cut)
    found = row.measured
    if found is None:
        yield from ("", "", "", "", "", "FAILED", "")
        return
    yield from (f"{value:.1e}" for value in (found.loss, found.logprob, found.grad_norm))
    for worst in (found.worst("gradients"), found.worst("weights")):
        yield f"{worst[1]:.1e} {worst[0].removeprefix('model.').removesuffix('.weight')}"
    yield "passed" if row.passed else "FAILED"
    yield f"{found.seconds:.1f}"


def reasons(certificate: Certificate) -> Iterator[str]:
    """Of every row that failed, what was above its tolerance."""
    for row in certificate.rows:
        yield from (f"{row.layout}, {row.cut}: {failure}" for failure in row.failures)


def write_certificate(certificate: Certificate, folder: Path) -> Path:
    """certificate.json in the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    write_atomically(path, json.dumps(as_json(certificate), indent=1) + "\n")
    return path


def as_json(certificate: Certificate) -> dict[str, Any]:
    plan = certificate.plan
    return {
        "format": FORMAT,
        "passed": certificate.passed,
        "subject": plan.subject.name,
        "recipe_digest": plan.subject.digest,
        "kept_megatron_cfg": plan.kept,
        "config": plan.config,
        "precision": plan.precision,
        "device": plan.device,
        "processes": plan.processes,
        "planted_fault": plan.plant,
        "reference": REFERENCE,
        "tolerances": asdict(certificate.allowed),
        "rows": [row.as_json() for row in certificate.rows],
        "software": {"python": platform.python_version(), "packages": package_versions()},
        "code": code_state(),
        "machine": machine(),
    }
