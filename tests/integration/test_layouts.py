"""tiny_arith on several processes, by overrides alone: it starts as on one, learns, survives the loss of a rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_recipes.recipe.compose import resolve
from grpo_recipes.runs.folder import RunFolder, create_run
from grpo_recipes.runs.metrics import read_metrics, series
from grpo_recipes.runs.rollouts import read_rollouts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CFG = "policy.megatron_cfg"
SHORT = (
    "grpo.num_prompts_per_step=16",
    "grpo.max_num_steps=2",
    "grpo.max_val_samples=64",
    "grpo.val_greedy=false",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "logger.num_rollouts_to_keep=128",
)
TP2 = ("cluster.cpu_processes=2", f"{CFG}.tensor_model_parallel_size=2")
PP2_DP2 = ("cluster.cpu_processes=4", f"{CFG}.pipeline_model_parallel_size=2")
TP2_PP2 = ("cluster.cpu_processes=4", f"{CFG}.tensor_model_parallel_size=2", f"{CFG}.pipeline_model_parallel_size=2")
CP2 = ("cluster.cpu_processes=2", f"{CFG}.context_parallel_size=2")
DP2 = ("cluster.cpu_processes=2",)


def start(path: Path, *overrides: str) -> Path:
    run = create_run(path)
    run.recipe_path.write_text(resolve("tiny_arith", overrides).to_yaml())
    return path


def job(path: Path, program: tuple[str, ...] = ("-m", "grpo_recipes.job"), *arguments: str):
    return subprocess.run([sys.executable, *program, str(path), *arguments], capture_output=True, text=True)


def finished(path: Path, *overrides: str) -> Path:
    done = job(start(path, *overrides))
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def metrics(path: Path, kind: str, step: int) -> dict[str, float]:
    [row] = [row for row in read_metrics(path / "metrics.jsonl") if (row.kind, row.step) == (kind, step)]
    return row.metrics


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("run") / "one", *SHORT)


@pytest.mark.parametrize(
    ("layout", "sampler_weights", "processes"),
    [(TP2, "copy", "2"), (CP2, "copy", "2"), (DP2, "shared", "2"), (PP2_DP2, "copy", "4")],
    ids=["TP2", "CP2", "DP2", "PP2-DP2"],
)
def test_the_first_step_is_that_of_one_process(one_process, tmp_path, layout, sampler_weights, processes):
    """The same draws token for token, and float32 rounding in what is computed from them."""
    run = finished(tmp_path / "run", *SHORT, *layout)
    drawn, alone = ([r.token_ids for r in read_rollouts(RunFolder(path), 1)] for path in (run, one_process))
    assert len(drawn) == 128 and drawn == alone
    assert metrics(run, "val", 0) == metrics(one_process, "val", 0)
    found, expected = metrics(run, "train", 1), metrics(one_process, "train", 1)
    for name in ("train/reward", "train/advantage_abs_mean", "train/valid_tokens", "train/weight_version"):
        assert found[name] == expected[name], name
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/kl", "train/ratio_mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    # The sampler's weights are the trainer's after a refit, too: the second step finds them together again.
    assert metrics(run, "train", 2)["train/weight_version"] == 1.0
    assert metrics(run, "train", 2)["train/logprob_diff_max"] < 1e-4
    backends = json.loads((run / "manifest.json").read_text())["backends"]
    assert (backends["sampler_weights"], backends["processes"]) == (sampler_weights, processes)


def test_tensor_and_pipeline_parallel_together_learn(tmp_path):
    """Thirty steps of the real recipe's size. Chance alone moves 512 judged answers by 2 points."""
    run = finished(tmp_path / "run", "grpo.max_num_steps=30", "grpo.val_period=0", "grpo.val_greedy=false", *TP2_PP2)
    accuracy = dict(series(read_metrics(run / "metrics.jsonl"), "val/accuracy"))
    assert accuracy[30] >= accuracy[0] + 0.1


def test_a_killed_worker_ends_the_job_with_its_rank_and_the_run_goes_on(tmp_path):
    """Covers: a rank that dies leaves the others waiting."""
    saved = (*SHORT, "grpo.max_num_steps=3", "checkpointing.save_period=1", *TP2)
    whole = finished(tmp_path / "whole", *saved)
    run = start(tmp_path / "killed", *saved)
    ended = job(run, (str(Path(__file__).with_name("killed_worker.py")),), "1", "2")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "error: rank 1 of 2 (process " in ended.stderr
    assert "was killed by SIGKILL (out of memory?) during train" in ended.stderr
    assert "Traceback" not in ended.stderr
    progress = json.loads((run / "progress.json").read_text())
    assert progress["status"] == "failed" and progress["message"].startswith("error: rank 1 of 2")
    done = job(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from step 2" in done.stdout
    assert metrics(run, "train", 3) == metrics(whole, "train", 3)
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (run, whole)]
    assert weights[0] == weights[1]
