"""`nemo-run certify refit`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_recipes.engine.refit import PROBE_LIMITS, Transport
from grpo_recipes.errors import UserError
from grpo_recipes.proof.certificate.certify import Device
from grpo_recipes.proof.certificate.subject import subject_of
from grpo_recipes.proof.certificate.tolerances import Precision
from grpo_recipes.proof.refit_certificate.certify import (
    RefitCertificate,
    Row,
    certify_refit,
    make_refit_plan,
    write_refit_certificate,
)

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 150  # of the table where no terminal limits it


def run(
    name: str | None,
    overrides: Sequence[str],
    *,
    family: str | None,
    layout: str | None,
    transport: Transport,
    device: Device,
    precision: Precision,
    output: Path | None,
    plant: str | None,
) -> int:
    """Certify and print. Returns the exit status: 0 if every weight arrived, otherwise 1.

    Raises:
        UserError: as `subject_of` and `make_refit_plan`; `output` is a file.
    """
    from rich.console import Console

    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file", where="--output", mend="give a folder for the certificate")
    plan = make_refit_plan(
        subject_of(name, overrides, family),
        layout,
        transport=transport,
        device=device,
        precision=precision,
        plant=plant,
    )
    certificate = certify_refit(plan, tell=_tell)
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(table(certificate))
    for row in certificate.rows:
        if row.failure:
            console.print(f"refit {row.refit}: {row.failure}", markup=False, soft_wrap=True)
    if output is not None:
        console.print(f"written to {write_refit_certificate(certificate, output)}", markup=False, soft_wrap=True)
    return 0 if certificate.passed else 1


def _tell(row: Row) -> None:
    print(f"refit {row.refit}: {'FAILED' if row.failure else 'passed'}", file=sys.stderr, flush=True)


def table(certificate: RefitCertificate) -> Table:
    from rich.table import Table

    refit_plan = certificate.plan
    plan, config = refit_plan.plan, refit_plan.plan.config
    limits = PROBE_LIMITS[plan.precision]
    found = Table(
        title=f"{plan.subject.name} shrunk to {config['num_hidden_layers']} layers, hidden size {config['hidden_size']}; "
        f"{plan.precision} on {plan.device}; trainer {refit_plan.layout}, vLLM, transport {refit_plan.transport}",
        title_justify="left",
        caption=f"allowed: largest {limits.largest:g}, mean {limits.mean:g} nats; every checksum equal",
        caption_justify="left",
    )
    for name in (
        "refit",
        "tensors",
        "changed",
        "bytes",
        "GB/s",
        "largest logprob difference",
        "live unseen",
        "verdict",
    ):
        found.add_column(name, justify="right")
    for row in certificate.rows:
        found.add_row(*_cells(row))
    return found


def _cells(row: Row) -> Iterator[str]:
    stats = row.stats
    yield str(row.refit)
    if stats is None:
        yield from ("", str(row.changed), "", "", "", "", "FAILED")
        return
    yield from (str(stats.tensors), str(row.changed), f"{stats.bytes:,}", f"{stats.bytes / stats.seconds / 1e9:.3f}")
    yield from (f"{stats.largest_gap:.1e}", str(len(stats.unseen)), "passed")
