"""Killed at any moment and resumed, a run ends bit for bit like the one that was never interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_recipes.recipe.compose import resolve
from grpo_recipes.runs.folder import create_run
from grpo_recipes.runs.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

OVERRIDES = (
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=8",
    "grpo.max_num_steps=6",
    "grpo.val_period=2",
    "grpo.max_val_samples=32",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "policy.train_global_batch_size=32",
    "checkpointing.save_period=1",
)


def start(path: Path, overrides=OVERRIDES) -> Path:
    run = create_run(path)
    run.recipe_path.write_text(resolve("tiny_arith", overrides).to_yaml())
    return path


def job(path: Path, point: str = "never", step: int = 0) -> subprocess.CompletedProcess:
    script = Path(__file__).with_name("killed_job.py")
    return subprocess.run(
        [sys.executable, str(script), str(path), point, str(step)], capture_output=True, text=True, timeout=200
    )


def outcome(path: Path):
    rows = {(row.kind, row.step): row.metrics for row in read_metrics(path / "metrics.jsonl")}
    return rows, (path / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    path = start(tmp_path_factory.mktemp("run") / "whole")
    done = job(path)
    assert done.returncode == 0, done.stderr
    rows, weights = outcome(path)
    assert [step for kind, step in rows if kind == "train"] == [1, 2, 3, 4, 5, 6]
    assert [step for kind, step in rows if kind == "val"] == [0, 2, 4, 6]
    assert any(metrics["train/grad_norm"] > 0 for (kind, _), metrics in rows.items() if kind == "train")
    return rows, weights


def test_killed_in_every_phase(uninterrupted, tmp_path):
    """Covers: loss after restore differs; fresh Adam silently; data order shifts on the second resume.

    Each attempt goes on from where the one before was killed: eleven resumes in one run.
    """
    path = start(tmp_path / "killed")
    kills = [
        ("setup", 0),
        ("evaluation", 0),
        ("generation", 0),
        ("checkpoint", 1),
        ("half a checkpoint", 1),
        ("reward", 1),
        ("before the rename", 2),
        ("logprobs", 2),
        ("reference_logprobs", 3),
        ("policy_training", 3),
        ("between optimizer steps", 4),
        ("refit", 5),
        ("export", 6),
    ]
    for point, step in kills:
        killed = job(path, point, step)
        assert killed.returncode == -signal.SIGKILL, f"{point} {step}: {killed.stdout}{killed.stderr}"
    finished = job(path)
    assert finished.returncode == 0, finished.stderr
    rows, weights = outcome(path)
    assert rows == uninterrupted[0]
    assert weights == uninterrupted[1]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["attempts"][-1]["resumed_from"] == 6


def test_killed_while_checkpoints_are_written_in_the_background(uninterrupted, tmp_path):
    path = start(tmp_path / "background", (*OVERRIDES, "checkpointing.async_save=true"))
    checkpoints = path / "checkpoints"
    for point, step in (("half a file", 2), ("before the rename", 3)):
        killed = job(path, point, step)
        assert killed.returncode == -signal.SIGKILL, f"{point} {step}: {killed.stdout}{killed.stderr}"
        assert max(checkpoint.name for checkpoint in checkpoints.glob("step_*")) == f"step_{step - 1:06d}"
        if point == "half a file":
            assert (checkpoints / ".writing_step_000002" / "policy" / "rank-00000.safetensors").read_bytes() == b"half"
    finished = job(path)
    assert finished.returncode == 0, finished.stderr
    assert outcome(path) == uninterrupted


def test_a_damaged_checkpoint_falls_back_and_ends_the_same(uninterrupted, tmp_path):
    path = start(tmp_path / "damaged")
    assert job(path, "generation", 4).returncode == -signal.SIGKILL
    newest = path / "checkpoints" / "step_000004"
    [weights] = (newest / "policy").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-7])
    finished = job(path)
    assert finished.returncode == 0, finished.stderr
    assert "step_000004 is damaged" in finished.stderr and "resumed from step 3" in finished.stdout
    assert outcome(path) == uninterrupted


def test_a_stop_signal_checkpoints_and_can_be_resumed(uninterrupted, tmp_path):
    path = start(tmp_path / "stopped", (*OVERRIDES[:-1], "checkpointing.save_period=100"))
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen([sys.executable, "-m", "grpo_recipes.job", str(path)], stdout=log, stderr=log)
    progress = path / "progress.json"
    deadline = time.monotonic() + 120
    while not (progress.exists() and json.loads(progress.read_text())["step"] >= 2):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    said = (tmp_path / "log").read_text()
    assert "--resume" in said
    assert json.loads(progress.read_text())["status"] == "interrupted"
    assert next((path / "checkpoints").iterdir()).name.startswith("step_")
    finished = job(path)
    assert finished.returncode == 0, finished.stderr
    assert outcome(path) == uninterrupted


def test_resuming_with_other_data_is_refused(tmp_path):
    path = start(tmp_path / "other")
    assert job(path, "generation", 1).returncode == -signal.SIGKILL
    recipe = path / "recipe.yaml"
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    content["inputs"]["train_rows"] = "0" * 64
    manifest.write_text(json.dumps(content))
    assert recipe.is_file()
    refused = job(path)
    assert refused.returncode == 2
    assert "changed since the run began: train_rows" in refused.stderr


OFFLINE = """
import fcntl, os, socket, struct, sys
os.unshare(os.CLONE_NEWNET)
lo_up = struct.pack("16sh", b"lo", 0x41)  # IFF_UP | IFF_RUNNING
fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, lo_up)  # SIOCSIFFLAGS
os.execv(sys.executable, [sys.executable, "-m", "grpo_recipes.job", sys.argv[1]])
"""


def test_a_job_needs_no_network(tmp_path):
    """The whole job runs in a network namespace of its own, with nothing in it but loopback."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make a network namespace")
    path = start(tmp_path / "offline", (*OVERRIDES, "grpo.max_num_steps=1"))
    done = subprocess.run([sys.executable, "-c", OFFLINE, str(path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
