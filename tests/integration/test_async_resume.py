"""A run that draws ahead of training, killed and resumed, trains on every prompt once. Trainer, loop, checkpoints and
process are the product's; the generator is one that draws in a thread."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

import job_runs
from grpo_recipes.data.sampler import epoch_order
from grpo_recipes.runs.arrivals import read_arrivals
from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.metrics import read_metrics
from grpo_recipes.runs.rollout_store import read_stored

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GROUPS, SAMPLES, STEPS = 8, 4, 6
OVERRIDES = (
    "policy.generation.backend=vllm",
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.max_trajectory_age_steps=2",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "grpo.async_grpo.consumption=ready_first",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
    f"grpo.num_prompts_per_step={GROUPS}",
    f"grpo.num_generations_per_prompt={SAMPLES}",
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_period=3",
    "grpo.max_val_samples=16",
    "policy.train_global_batch_size=16",
    "checkpointing.save_period=1",
    f"logger.num_rollout_steps_to_store={STEPS}",
)


def test_killed_and_resumed_every_prompt_is_trained_on_once(tmp_path):
    """Covers: asynchronous resume loses a third of the prompts or deadlocks."""
    path = job_runs.start(tmp_path / "run", *OVERRIDES)
    program = [str(Path(__file__).with_name("async_job.py"))]
    for point, step in (("policy_training", 1), ("generation", 3), ("refit", 4)):
        killed = job_runs.job(path, point, str(step), program=program)
        assert killed.returncode == -signal.SIGKILL, f"{point} {step}: {killed.stdout}{killed.stderr}"
        newest = max((path / "checkpoints").glob("step_*"))
        state = json.loads((newest / "state.json").read_text())["state"]
        assert len(state["pending"]) == GROUPS  # a step's groups were in flight
    finished = job_runs.job(path, "never", "0", program=program)
    assert finished.returncode == 0, finished.stderr

    folder = RunFolder(path)
    arrivals = read_arrivals(folder)
    assert sorted(arrivals) == list(range(1, STEPS + 1))
    assert Counter(n for groups in arrivals.values() for n in groups) == Counter(range(STEPS * GROUPS))
    rows = json.loads(folder.manifest_path.read_text())["inputs"]["rows"]["train"]
    order = epoch_order(42, 0, rows)  # of grpo.seed
    versions = set()
    for step in range(1, STEPS + 1):
        stored = read_stored(folder, step)
        assert stored.group.tolist() == [n for n in sorted(arrivals[step]) for _ in range(SAMPLES)]
        assert stored.example.tolist() == [order[n] for n in stored.group.tolist()]
        versions |= set(stored.weight_versions.tolist())
    assert len(versions) > 1
    steps = [row for row in read_metrics(folder.metrics_path) if row.kind == "train"]
    assert [row.step for row in steps] == list(range(1, STEPS + 1))
    assert all(row.metrics["train/trajectory_age_max"] <= 2 for row in steps)
    assert all(row.timing["rollout_wait"] >= 0 for row in steps)
