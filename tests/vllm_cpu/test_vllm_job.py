"""Whole runs of the job with the real vLLM as its generator."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

import job_runs
from grpo_recipes.runs.metrics import read_metrics

VLLM = "policy.generation.backend=vllm"
TOLERANCE = 1e-4  # natural log, float32 on both sides


def rows(run, kind):
    return [row for row in read_metrics(run / "metrics.jsonl") if row.kind == kind]


@pytest.mark.timeout(900)
def test_tiny_arith_learns_from_what_vllm_draws(tmp_path):
    """From about 0.5 to above 0.6; five steps are 2,560 samples, so that 0.05 is far beyond chance."""
    run = job_runs.finished(tmp_path / "run", VLLM, "grpo.max_num_steps=40", "grpo.val_period=0")
    rewards = [row.metrics["train/reward"] for row in rows(run, "train")]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05
    assert all(row.metrics["train/logprob_diff_max"] < TOLERANCE for row in rows(run, "train"))
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["backends"]["generation"] == manifest["backends"]["sampler_weights"] == "vllm"


@pytest.mark.timeout(900)
def test_two_ranks_hand_over_one_model(tmp_path):
    layout = ("cluster.cpu_processes=2", "policy.megatron_cfg.tensor_model_parallel_size=2")
    run = job_runs.finished(tmp_path / "run", VLLM, *layout, *job_runs.SHORT, "grpo.max_num_steps=3")
    assert len(rows(run, "train")) == 3
    assert all(row.metrics["train/logprob_diff_max"] < TOLERANCE for row in rows(run, "train"))


def killed_at_step_2(run, victim):
    """Kill one process of a running job: its status, what it said, and whether any process of it is left."""
    overrides = ("grpo.max_num_steps=1000", "grpo.val_period=0", "grpo.val_at_start=false")
    job_runs.start(run, VLLM, *overrides)
    command = [sys.executable, "-m", "grpo_recipes.job", str(run)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        try:
            while not (run / "progress.json").exists() or read_progress(run)["step"] < 2:
                assert job.poll() is None
                time.sleep(0.5)
            children = psutil.Process(job.pid).children(recursive=True)
            [core] = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
            {"job": psutil.Process(job.pid), "front": core.parent(), "core": core}[victim].kill()
            _, alive = psutil.wait_procs(children, timeout=30)
            _, said = job.communicate(timeout=30)
        finally:
            job.kill()
    return job.returncode, said, alive


def read_progress(run):
    return json.loads((run / "progress.json").read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["front", "core"])
def test_a_killed_engine_ends_the_run_with_one_error(tmp_path, victim):
    status, said, alive = killed_at_step_2(tmp_path / "run", victim)
    assert (status, alive) == (1, [])
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the vLLM engine is gone")


@pytest.mark.timeout(900)
def test_an_engine_ends_with_a_killed_job(tmp_path):
    status, _, alive = killed_at_step_2(tmp_path / "run", "job")
    assert (status, alive) == (-signal.SIGKILL, [])
