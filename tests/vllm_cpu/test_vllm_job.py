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
    """Its warm start solves about four in ten; the embedded sampler takes it as far in as many steps."""
    run = job_runs.finished(tmp_path / "run", VLLM, "grpo.max_num_steps=40", "grpo.val_period=0")
    rewards = [row.metrics["train/reward"] for row in rows(run, "train")]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert all(row.metrics["train/logprob_diff_max"] < TOLERANCE for row in rows(run, "train"))
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["backends"]["generation"] == manifest["backends"]["sampler_weights"] == "vllm"


@pytest.mark.timeout(900)
def test_two_ranks_hand_over_one_model(tmp_path):
    layout = ("cluster.cpu_processes=2", "policy.megatron_cfg.tensor_model_parallel_size=2")
    run = job_runs.finished(tmp_path / "run", VLLM, *layout, *job_runs.SHORT, "grpo.max_num_steps=3")
    assert len(rows(run, "train")) == 3
    assert all(row.metrics["train/logprob_diff_max"] < TOLERANCE for row in rows(run, "train"))


@pytest.mark.timeout(900)
def test_a_killed_engine_ends_the_run_with_one_error(tmp_path):
    run = job_runs.start(
        tmp_path / "run", VLLM, "grpo.max_num_steps=1000", "grpo.val_period=0", "grpo.val_at_start=false"
    )
    command = [sys.executable, "-m", "grpo_recipes.job", str(run)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        try:
            while (
                json.loads((run / "progress.json").read_text())["step"] < 2
                if (run / "progress.json").exists()
                else True
            ):
                assert job.poll() is None
                time.sleep(0.5)
            children = psutil.Process(job.pid).children(recursive=True)
            [core] = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
            core.send_signal(signal.SIGKILL)
            _, said = job.communicate(timeout=30)
        finally:
            job.kill()
    assert job.returncode == 1
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the vLLM engine is gone")
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
