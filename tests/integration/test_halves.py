"""Rollouts and training apart: what one run draws, another trains on, in whatever layout."""

import signal
from pathlib import Path

import pytest

import job_runs
from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.manifest import read_manifest
from grpo_recipes.runs.metrics import read_metrics
from grpo_recipes.runs.mode import Mode, write_mode
from grpo_recipes.runs.rollout_store import ARRAYS, read_stored, stored_steps

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

OVERRIDES = (
    "grpo.num_prompts_per_step=16",
    "grpo.max_num_steps=3",
    "grpo.max_val_samples=16",
    "grpo.val_period=0",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "logger.num_rollout_steps_to_store=3",
)
TP2 = ("cluster.cpu_processes=2", f"{job_runs.CFG}.tensor_model_parallel_size=2")
DP2 = ("cluster.cpu_processes=2",)
TOLERANCE = 2e-5  # of a loss of order 0.01: float32 sums in another order, after up to 12 optimizer steps


def part(path, mode, *overrides):
    job_runs.start(path, *OVERRIDES, *overrides)
    write_mode(RunFolder(path), mode)
    return job_runs.job(path)


def done(path, mode, *overrides):
    process = part(path, mode, *overrides)
    assert process.returncode == 0, process.stdout + process.stderr
    return path


def trained(path):
    return {row.step: row.metrics for row in read_metrics(path / "metrics.jsonl") if row.kind == "train"}


def weights(path):
    return (path / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return done(tmp_path_factory.mktemp("halves") / "whole", Mode())


def test_training_on_stored_rollouts_is_the_same_training_bit_for_bit(whole, tmp_path):
    again = done(tmp_path / "again", Mode("train-only", str(whole)))
    assert trained(again) == trained(whole) and len(trained(whole)) == 3
    assert weights(again) == weights(whole)
    manifest = read_manifest(RunFolder(again))
    assert manifest["mode"] == {"kind": "train-only", "source": str(whole)}
    assert (manifest["backends"]["generation"], manifest["backends"]["sampler_weights"]) == ("none", "none")


@pytest.mark.parametrize("layout", [TP2, DP2], ids=["tp2", "dp2"])
def test_every_layout_gives_the_same_loss_on_the_same_rollouts(whole, tmp_path, layout):
    ours, theirs = trained(done(tmp_path / "run", Mode("train-only", str(whole)), *layout)), trained(whole)
    for step in (1, 2, 3):
        assert ours[step]["train/loss"] == pytest.approx(theirs[step]["train/loss"], abs=TOLERANCE)
        assert ours[step]["train/grad_norm"] == pytest.approx(theirs[step]["train/grad_norm"], rel=1e-3)
        assert ours[step]["train/reward"] == theirs[step]["train/reward"]


def test_rollouts_alone_are_those_of_the_first_weights_also_after_a_kill(whole, tmp_path):
    overrides = (*OVERRIDES, "logger.num_rollout_steps_to_store=0", "checkpointing.save_period=1")
    half = job_runs.start(tmp_path / "half", *overrides)
    write_mode(RunFolder(half), Mode("rollout-only"))
    killer = str(Path(__file__).with_name("killed_job.py"))
    assert job_runs.job(half, "generation", "2", program=[killer]).returncode == -signal.SIGKILL
    assert stored_steps(RunFolder(half)) == [1, 2]
    process = job_runs.job(half)
    assert process.returncode == 0, process.stderr
    assert "resumed from step 2" in process.stdout
    assert stored_steps(RunFolder(half)) == [1, 2, 3] and not (half / "model").exists()
    first, theirs = read_stored(RunFolder(half), 1), read_stored(RunFolder(whole), 1)
    for name in ARRAYS:
        assert getattr(first, name).tobytes() == getattr(theirs, name).tobytes(), name
    last, theirs = read_stored(RunFolder(half), 3), read_stored(RunFolder(whole), 3)
    for name in ("prompt_ids", "example", "group", "sample", "seed"):
        assert getattr(last, name).tobytes() == getattr(theirs, name).tobytes(), name
    assert set(last.weight_versions.tolist()) == {0} and set(theirs.weight_versions.tolist()) == {2}
    trainer = done(tmp_path / "trained", Mode("train-only", str(half)))
    assert trained(trainer)[1]["train/grad_norm"] == trained(whole)[1]["train/grad_norm"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("policy.generation.temperature=0.5", "another policy.generation.temperature 1.0 (here 0.5)"),
        ("grpo.max_num_steps=4", "holds no rollouts of step 4"),
    ],
)
def test_rollouts_of_another_recipe_or_too_few_are_refused(whole, tmp_path, override, says):
    process = part(tmp_path / "run", Mode("train-only", str(whole)), override)
    assert process.returncode == 2
    [line] = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert says in line
