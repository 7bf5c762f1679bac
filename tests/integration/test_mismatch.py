"""A sampler that draws by other weights than it says: the run ends before it trains on that, and the cause is found."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.metrics import read_metrics
from grpo_recipes.runs.rollouts import read_rollouts
from job_runs import CFG, SHORT, job, metrics, start

pytestmark = pytest.mark.timeout(900)
STALE = str(Path(__file__).with_name("stale_sampler_job.py"))
LIMIT = 1.005


def test_a_batch_beyond_the_limit_is_not_trained_on(tmp_path):
    """Covers: stale weights after a refit. Two processes share a model, so that the sampler has a copy of its own."""
    run = start(
        tmp_path / "run",
        *SHORT,
        "cluster.cpu_processes=2",
        f"{CFG}.tensor_model_parallel_size=2",
        f"{CFG}.optimizer.lr=1e-3",
        f"{CFG}.scheduler.lr_warmup_iters=0",
        f"loss_fn.mismatch.token_mult_prob_error.abort={LIMIT}",
        "loss_fn.mismatch.token_mult_prob_error.warn=1.0001",
        "logger.num_rollouts_to_keep=1",
        "grpo.max_num_steps=3",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "checkpointing.save_period=1",
        "checkpointing.async_save=true",
        "checkpointing.keep_last=4",
    )
    done = job(run, "2", program=(STALE,))
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stderr
    assert f"loss_fn.mismatch.token_mult_prob_error.abort = {LIMIT}: step 3: token_mult_prob_error" in said
    assert "was not trained on" in said and "worst for the prompts of rows " in said
    assert [row.step for row in read_metrics(run / "metrics.jsonl") if row.kind == "train"] == [1, 2]
    assert metrics(run, "train", 2)["train/token_mult_prob_error"] < 1.0001
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000001", "step_000002"]

    records = read_rollouts(RunFolder(run), 3)
    worst = [record for record in records if record.mult_prob_error is not None]
    assert len(worst) == 5 and max(record.mult_prob_error for record in worst) > LIMIT
    assert all(len(record.trainer_logprobs) == len(record.logprobs) > 0 for record in worst)
    assert all(str(record.row) in said for record in sorted(worst, key=lambda r: -r.mult_prob_error)[:3])

    command = [sys.executable, "-m", "grpo_recipes.cli"]
    found = subprocess.run([*command, "diagnose", str(run), "--step", "3"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "largest part: stale weights (weights 1 (step_000001))" in found.stdout
    assert subprocess.run([*command, "report", str(run)], capture_output=True).returncode == 0
    assert "Worst responses of step 3" in (run / "report.html").read_text()

    mended = job(run)  # with a sampler that takes its weights
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert "resumed from step 2" in mended.stdout
    assert metrics(run, "train", 3)["train/token_mult_prob_error"] < 1.0001
