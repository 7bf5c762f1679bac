"""Runs of the job for tests: in a folder of their own, by the process that the product starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_recipes.recipe.compose import resolve
from grpo_recipes.runs.folder import create_run
from grpo_recipes.runs.metrics import read_metrics

CFG = "policy.megatron_cfg"
SHORT = (
    "grpo.num_prompts_per_step=16",
    "grpo.max_num_steps=2",
    "grpo.max_val_samples=64",
    "grpo.val_greedy=false",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "logger.num_rollouts_to_keep=128",
)


def start(path: Path, *overrides: str, recipe: str = "tiny_arith") -> Path:
    run = create_run(path)
    run.recipe_path.write_text(resolve(recipe, overrides).to_yaml())
    return path


def job(
    path: Path, *arguments: str, program: Sequence[str] = ("-m", "grpo_recipes.job")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *program, str(path), *arguments], capture_output=True, text=True)


def finished(path: Path, *overrides: str) -> Path:
    done = job(start(path, *overrides))
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def metrics(path: Path, kind: str, step: int) -> dict[str, float]:
    [row] = [row for row in read_metrics(path / "metrics.jsonl") if (row.kind, row.step) == (kind, step)]
    return row.metrics
