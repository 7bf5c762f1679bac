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


GONE_S = 60  # for the processes of a killed one to end, on a busy machine


def killed_at_step_2(run, victim, *overrides):
    """Kill one process of a running job: the job, its children at that moment, and what is left to wait for."""
    job_runs.start(run, VLLM, "grpo.val_period=0", "grpo.val_at_start=false", *overrides)
    command = [sys.executable, "-m", "grpo_recipes.job", str(run)]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not (run / "progress.json").exists() or read_progress(run)["step"] < 2:
            assert job.poll() is None
            time.sleep(0.5)
        children = psutil.Process(job.pid).children(recursive=True)
        core = next(child for child in children if "EngineCore" in " ".join(child.cmdline()))
        {"job": psutil.Process(job.pid), "front": core.parent(), "core": core}[victim].kill()
    except BaseException:
        job.kill()
        raise
    return job, children


def read_progress(run):
    return json.loads((run / "progress.json").read_text())


@pytest.mark.timeout(900)
def test_a_killed_engine_is_replaced_and_the_run_goes_on(tmp_path):
    run = tmp_path / "run"
    job, children = killed_at_step_2(
        run, "core", "policy.generation.num_engines=2", "grpo.max_num_steps=6", "grpo.val_at_end=false"
    )
    _, said = job.communicate(timeout=600)
    assert job.returncode == 0, said
    [warning] = [line for line in said.splitlines() if "is started anew" in line]
    assert "the vLLM engine is gone" in warning and "(restart 1 of 3)" in warning
    assert len(rows(run, "train")) == 6
    assert all(row.metrics["train/logprob_diff_max"] < TOLERANCE for row in rows(run, "train"))
    assert psutil.wait_procs(children, timeout=GONE_S)[1] == []


@pytest.mark.timeout(900)
def test_a_killed_engine_ends_a_run_that_may_not_restart_it(tmp_path):
    job, children = killed_at_step_2(
        tmp_path / "run", "front", "grpo.max_num_steps=1000", "policy.generation.max_engine_restarts=0"
    )
    _, said = job.communicate(timeout=GONE_S)
    assert job.returncode == 1
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the vLLM engine is gone")
    assert psutil.wait_procs(children, timeout=GONE_S)[1] == []


@pytest.mark.timeout(900)
def test_an_engine_ends_with_a_killed_job(tmp_path):
    job, children = killed_at_step_2(tmp_path / "run", "job", "grpo.max_num_steps=1000")
    assert job.wait(timeout=GONE_S) == -signal.SIGKILL
    assert psutil.wait_procs(children, timeout=GONE_S)[1] == []
