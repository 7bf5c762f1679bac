"""Do the trainer's weights arrive at vLLM? A tiny model of a recipe's architecture, trained and refitted twice, says so.

The trainer runs in the recipe's layout, its sizes reduced to 2; the engine is the installed vLLM. Each refit carries the
weights of another optimizer step and is certified as in a run (engine/refit.py).
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_recipes.engine.refit import PROBE_LIMITS, EngineRefit, RefitStats, Transport
from grpo_recipes.generation.sync.contract import RefitError
from grpo_recipes.proof.certificate.certify import LONGEST_SEQUENCE, Device, Plan, make_plan, policy_of
from grpo_recipes.proof.certificate.layouts import Layout
from grpo_recipes.proof.certificate.subject import Subject
from grpo_recipes.proof.certificate.tolerances import Precision
from grpo_recipes.proof.refit_certificate.worker import check_plant, make_refit_worker
from grpo_recipes.recipe.schema import PolicyConfig
from grpo_recipes.recipe.shrink import shrink
from grpo_recipes.runs.files import write_atomically
from grpo_recipes.runs.manifest import code_state, machine, package_versions

REFITS = 2
HEAD_DIM = 32  # the least that vLLM takes on a CPU
TIME_LIMIT_S = 600
FILE = "refit_certificate.json"
FORMAT = 1


@dataclass(frozen=True)
class RefitPlan:
    plan: Plan  # model, device, precision
    layout: Layout  # of the trainer
    transport: Transport
    plant: str | None = None


@dataclass(frozen=True)
class Row:
    """One refit. `changed`: tensors that the step before it changed."""

    refit: int
    changed: int
    stats: RefitStats | None
    failure: str = ""


@dataclass(frozen=True)
class RefitCertificate:
    plan: RefitPlan
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return len(self.rows) == REFITS and not any(row.failure for row in self.rows)


def make_refit_plan(
    subject: Subject,
    layout: str | None = None,
    *,
    transport: Transport = "ipc",
    device: Device = "auto",
    precision: Precision = "float32",
    plant: str | None = None,
) -> RefitPlan:
    """Raises UserError: as `make_plan`; vLLM is missing, or of another version."""
    from grpo_recipes.generation.vllm.arguments import check_vllm

    check_plant(plant)
    own = subject.own or Layout()
    if device != "cuda":
        own = replace(own, etp=1)
    plan = make_plan(subject, [layout or str(own)], device=device, precision=precision)
    config = shrink(subject.config, layers=plan.config["num_hidden_layers"], head_dim=HEAD_DIM, where=subject.where)
    check_vllm(config, on_gpu=plan.device == "cuda")
    return RefitPlan(replace(plan, config=config), plan.layouts[-1], transport, plant)


def certify_refit(refit_plan: RefitPlan, tell: Callable[[Row], None] = lambda row: None) -> RefitCertificate:
    """Train, refit and compare, twice; the first failure ends it. `tell` hears of each row as it is known."""
    import torch

    from grpo_recipes.cluster.process import ProcessGroup
    from grpo_recipes.generation.vllm.arguments import engine_setup
    from grpo_recipes.generation.vllm.backend import VllmGenerator
    from grpo_recipes.proof.certificate.reference import write_checkpoint

    plan, layout = refit_plan.plan, refit_plan.layout
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="certify-") as scratch:
        checkpoint = Path(scratch) / "model"
        write_checkpoint(plan.config, checkpoint, getattr(torch, plan.precision))
        policy = with_vllm(policy_of(plan, layout, checkpoint), on_gpu=plan.device == "cuda")
        setup = engine_setup(policy, checkpoint, on_gpu=plan.device == "cuda", threads=1)
        factory = partial(
            make_refit_worker, policy=policy, model_folder=checkpoint, steps=REFITS, plant=refit_plan.plant
        )
        with (
            ProcessGroup(factory, layout.processes, device=plan.device, time_limit_s=TIME_LIMIT_S) as workers,
            VllmGenerator(setup, max_positions=LONGEST_SEQUENCE, time_limit_s=TIME_LIMIT_S) as generator,
        ):
            refit = EngineRefit(
                workers,
                lambda: [generator],
                transport=refit_plan.transport,
                certify="every",
                precision=plan.precision,
                vocab_size=plan.config["vocab_size"],
                longest=LONGEST_SEQUENCE,
            )
            for number in range(1, REFITS + 1):
                changed = len(workers.call("step")[0])
                try:
                    row = Row(number, changed, refit(number))
                except RefitError as error:
                    row = Row(number, changed, None, str(error))
                rows.append(row)
                tell(row)
                if row.failure:
                    break
    return RefitCertificate(refit_plan, tuple(rows))


def with_vllm(policy: PolicyConfig, *, on_gpu: bool) -> PolicyConfig:
    """On a GPU, which trainer and engine share, the engine gets a part of the memory."""
    cfg: dict[str, Any] = {"gpu_memory_utilization": 0.3, "enforce_eager": True} if on_gpu else {"block_size": 32}
    generation = policy.generation.model_copy(update={"backend": "vllm", "vllm_cfg": cfg})
    return policy.model_copy(update={"generation": generation})


def write_refit_certificate(certificate: RefitCertificate, folder: Path) -> Path:
    """refit_certificate.json in the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    refit_plan = certificate.plan
    plan = refit_plan.plan
    limits = PROBE_LIMITS[plan.precision]
    content = {
        "format": FORMAT,
        "passed": certificate.passed,
        "subject": plan.subject.name,
        "recipe_digest": plan.subject.digest,
        "config": plan.config,
        "layout": str(refit_plan.layout),
        "transport": refit_plan.transport,
        "precision": plan.precision,
        "device": plan.device,
        "planted_fault": refit_plan.plant,
        "probe": {"mean": limits.mean, **({} if limits.largest == float("inf") else {"largest": limits.largest})},
        "rows": [asdict(row) for row in certificate.rows],
        "software": {"python": platform.python_version(), "packages": package_versions()},
        "code": code_state(),
        "machine": machine(),
    }
    path = folder / FILE
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path
