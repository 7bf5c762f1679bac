"""Does a parallel layout change the result? A tiny model of a recipe's architecture says so.

The Megatron-Core trainer runs it in one process and in each layout, packed and unpacked, and is compared with Hugging
Face transformers in float64 (proof/certificate/reference.py) on the same random checkpoint.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_recipes.errors import UserError
from grpo_recipes.proof.certificate.layouts import Layout, fitting, layers_for, matrix, parse, unfit
from grpo_recipes.proof.certificate.pool import Pool
from grpo_recipes.proof.certificate.subject import CUDA_ONLY, Subject
from grpo_recipes.proof.certificate.tolerances import Precision, Tolerances, tolerances
from grpo_recipes.proof.certificate.verdict import CUTS, Row, failures, of_all_ranks
from grpo_recipes.recipe.architecture import check_architecture, number_of_experts
from grpo_recipes.recipe.megatron import megatron_problems
from grpo_recipes.recipe.megatron_combinations import RECOMPUTABLE_BY_TE, setting_problems
from grpo_recipes.recipe.problems import raise_problems
from grpo_recipes.recipe.schema import PolicyConfig
from grpo_recipes.recipe.shrink import shrink

if TYPE_CHECKING:
    from grpo_recipes.proof.certificate.reference import Reference

Device = Literal["auto", "cpu", "cuda"]
MAX_PROCESSES = 8
LONGEST_SEQUENCE = 64  # more than any of the reference's


@dataclass(frozen=True)
class Plan:
    """What will be run, checked before any process starts."""

    subject: Subject
    config: dict[str, Any]  # the tiny model's config.json
    layouts: tuple[Layout, ...]  # one process first
    processes: int  # of the pool
    device: Literal["cpu", "cuda"]
    precision: Precision
    plant: str | None = None

    @property
    def kept(self) -> dict[str, Any]:
        """Of the recipe's megatron_cfg, what is computed with on this device."""
        if self.device == "cuda":
            return self.subject.kept
        kept = {k: v for k, v in self.subject.kept.items() if k not in CUDA_ONLY}
        modules = kept.pop("recompute_modules", None)
        if modules is None:
            return kept
        left = [module for module in modules if module not in RECOMPUTABLE_BY_TE]
        if left:
            return kept | {"recompute_modules": left}
        kept.pop("recompute_granularity", None)  # nothing is left to recompute
        return kept


@dataclass(frozen=True)
class Certificate:
    plan: Plan
    allowed: Tolerances
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1


def make_plan(
    subject: Subject,
    layouts: Sequence[str] = (),
    *,
    whole_matrix: bool = False,
    processes: int | None = None,
    device: Device = "auto",
    precision: Precision = "float32",
    plant: str | None = None,
) -> Plan:
    """Choose the layouts: those named, the whole matrix, or what fits the recipe and two processes.

    Args:
        processes: at most so many; default: as many as the named layouts need, four for the matrix, otherwise two.

    Raises:
        UserError: the trainer does not cover the model; a layout is not one, does not fit the model or the processes;
            there are too few GPUs; settings cannot work.
    """
    if layouts and whole_matrix:
        raise UserError("--matrix and --layout were both given", where="certify layout", mend="leave one of them out")
    check_architecture(subject.config, subject.where)
    tiny = shrink(subject.config, where=subject.where)
    if precision == "bfloat16" and number_of_experts(tiny):
        raise UserError(
            "rounded to 8 bits a router may send a token to another expert than the reference does, which no tolerance "
            "for rounding covers",
            where="--precision",
            mend="certify a model with experts in float32",
        )
    if layouts:
        asked = [parse(text) for text in layouts]
        for layout in asked:
            reason = unfit(layout, tiny)
            if reason:
                raise UserError(f"{layout}: {reason}", where="--layout", mend="choose another layout")
        limit = processes or max(layout.processes for layout in asked)
    elif whole_matrix:
        limit = processes or 4
        asked = [layout for layout in matrix(tiny) if layout.processes <= limit]
    else:
        limit = processes or 2
        own = subject.own
        if own is not None and _device(device, limit) == "cpu":
            own = replace(own, etp=1)  # gloo cannot gather the uneven parts of cut experts
        asked = fitting(tiny, limit, own)
    if limit > MAX_PROCESSES:
        raise UserError(f"{limit} processes are more than {MAX_PROCESSES}", where="--processes", mend="use fewer")
    too_wide = [layout for layout in asked if layout.processes > limit]
    if too_wide:
        raise UserError(
            f"{too_wide[0]} needs {too_wide[0].processes} processes, and there are {limit}",
            where="--processes",
            mend=f"set it to at least {max(layout.processes for layout in too_wide)}",
        )
    every = tuple(dict.fromkeys([Layout(), *asked]))
    pool = max(layout.processes for layout in every)
    plan = Plan(
        subject=subject,
        config=shrink(subject.config, layers=layers_for(every), where=subject.where),
        layouts=every,
        processes=pool,
        device=_device(device, pool),
        precision=precision,
        plant=plant,
    )
    _check_settings(plan)
    return plan


def _check_settings(plan: Plan) -> None:
    """What the trainer would refuse is the user's mistake, not a result of the layout."""
    for layout in plan.layouts:
        if layout.etp > 1 and plan.device == "cpu":
            raise UserError(
                f"{layout} needs GPUs: experts get different numbers of tokens, and gloo gathers only equal ones",
                where="--layout",
                mend="name layouts without etp, or certify on GPUs",
            )
        policy = policy_of(plan, layout, Path("model"))
        problems = megatron_problems(policy.megatron_cfg) or setting_problems(policy, on_gpus=plan.device == "cuda")
        raise_problems(problems, f"layout {layout}")


def certify(plan: Plan, tell: Callable[[Row], None] = lambda row: None) -> Certificate:
    """Run every layout of the plan. `tell` hears of each row as it is known.

    Raises:
        UserError: an unknown planted fault.
    """
    from grpo_recipes.proof.certificate.faults import check_fault

    check_fault(plan.plant)
    rows: list[Row] = []
    with Pool(plan.processes, plan.device) as pool, open_bench(plan, pool) as bench:
        for layout in plan.layouts:
            for row in bench.run(layout, plan.plant):
                rows.append(row)
                tell(row)
    return Certificate(plan, tolerances(plan.precision), tuple(rows))


@contextmanager
def open_bench(plan: Plan, pool: Pool) -> Iterator[Bench]:
    """The plan's checkpoint and reference, to run layouts one by one; gone at the end of the block."""
    import torch

    from grpo_recipes.proof.certificate.reference import run_reference, write_checkpoint

    with tempfile.TemporaryDirectory(prefix="certify-") as scratch:
        checkpoint = Path(scratch) / "model"
        model = write_checkpoint(plan.config, checkpoint, getattr(torch, plan.precision))
        yield Bench(plan, pool, checkpoint, run_reference(model, Path(scratch) / "reference.safetensors"))


@dataclass(frozen=True)
class Bench:
    """One model, on which any layout can be tried."""

    plan: Plan
    pool: Pool
    checkpoint: Path
    reference: Reference

    def run(self, layout: Layout, plant: str | None = None) -> list[Row]:
        """Packed and unpacked, in that order."""
        from grpo_recipes.proof.certificate.worker import Job

        allowed = tolerances(self.plan.precision)
        job = Job(
            number=self.pool.next_job(),
            processes=layout.processes,
            policy=policy_of(self.plan, layout, self.checkpoint),
            checkpoint=self.checkpoint,
            reference=self.reference,
            small=allowed.small,
            plant=plant,
        )
        try:
            found = self.pool.run(job)
        except Exception as error:  # whatever a layout does to its processes is its result, and the others go on
            first_line = (str(error).splitlines() or [""])[0]
            reason, details = f"{type(error).__name__}: {first_line}", "\n".join(getattr(error, "__notes__", []))
            return [Row(str(layout), layout.processes, cut, None, (reason,), details) for cut in CUTS]
        of_cut = {cut: of_all_ranks([parts[cut] for parts in found]) for cut in CUTS}
        return [
            Row(str(layout), layout.processes, cut, measured, tuple(failures(measured, allowed)))
            for cut, measured in of_cut.items()
        ]


def policy_of(plan: Plan, layout: Layout, checkpoint: Path) -> PolicyConfig:
    from grpo_recipes.proof.certificate.reference import LENGTHS, OPTIMIZER, TEMPERATURE

    megatron = {
        **plan.kept,
        **layout.megatron_cfg(),
        "optimizer": {
            "lr": OPTIMIZER.lr,
            "adam_beta1": OPTIMIZER.beta1,
            "adam_beta2": OPTIMIZER.beta2,
            "adam_eps": OPTIMIZER.eps,
            "weight_decay": OPTIMIZER.weight_decay,
        },
        "scheduler": {"lr_decay_style": "constant"},
    }
    if number_of_experts(plan.config):  # transformers adds no balancing loss to logits
        megatron |= {"moe_router_load_balancing_type": "none"}
    return PolicyConfig.model_validate(
        {
            "model_name": str(checkpoint),
            "train_global_batch_size": len(LENGTHS),
            "max_total_sequence_length": LONGEST_SEQUENCE,
            "precision": plan.precision,
            "max_grad_norm": OPTIMIZER.max_grad_norm,
            "generation": {"max_new_tokens": LONGEST_SEQUENCE // 2, "temperature": TEMPERATURE},
            "megatron_cfg": megatron,
        }
    )


def _device(asked: Device, processes: int) -> Literal["cpu", "cuda"]:
    import torch

    gpus = torch.cuda.device_count()
    if asked == "cuda" and gpus < processes:
        raise UserError(
            f"{processes} processes need as many GPUs, and there are {gpus}",
            where="--device",
            mend="use fewer processes, or --device cpu",
        )
    if asked == "auto":
        return "cuda" if gpus >= processes else "cpu"
    return asked
