"""`nemo-run certify layout`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_recipes.errors import UserError
from grpo_recipes.proof.certificate.certify import Device, certify, make_plan
from grpo_recipes.proof.certificate.report import reasons, table, write_certificate
from grpo_recipes.proof.certificate.subject import subject_of
from grpo_recipes.proof.certificate.tolerances import Precision
from grpo_recipes.proof.certificate.verdict import Row

WIDTH = 170  # of the table where no terminal limits it


def run(
    name: str | None,
    overrides: Sequence[str],
    *,
    family: str | None,
    layouts: Sequence[str],
    whole_matrix: bool,
    processes: int | None,
    device: Device,
    precision: Precision,
    output: Path | None,
    plant: str | None,
) -> int:
    """Certify and print. Returns the exit status: 0 if every layout stayed within the tolerances, otherwise 1.

    Raises:
        UserError: as `subject_of`, `make_plan` and `certify`; `output` is a file.
    """
    from rich.console import Console

    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file", where="--output", mend="give a folder for certificate.json")
    plan = make_plan(
        subject_of(name, overrides, family),
        layouts,
        whole_matrix=whole_matrix,
        processes=processes,
        device=device,
        precision=precision,
        plant=plant,
    )
    print(f"{len(plan.layouts)} layouts on {plan.processes} processes", file=sys.stderr, flush=True)
    certificate = certify(plan, tell=_tell)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(certificate))
    for line in reasons(certificate):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        console.print(str(write_certificate(certificate, output)), markup=False, highlight=False, soft_wrap=True)
    failed = sorted({row.layout for row in certificate.rows if not row.passed})
    console.print(f"failed: {', '.join(failed)}" if failed else "passed", markup=False, highlight=False)
    return certificate.exit_code


def _tell(row: Row) -> None:
    seconds = "" if row.measured is None else f" ({row.measured.seconds:.1f} s)"
    verdict = "passed" if row.passed else "FAILED"
    print(f"{row.layout}, {row.cut}: {verdict}{seconds}", file=sys.stderr, flush=True)
    if row.details:
        print(row.details, file=sys.stderr, flush=True)
