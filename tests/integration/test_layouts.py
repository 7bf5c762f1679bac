"""tiny_arith on several processes, by overrides alone: it starts as on one, learns, survives the loss of a rank."""

import json
from functools import cache
from pathlib import Path

import pytest

from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.metrics import read_metrics, series
from grpo_recipes.runs.rollouts import read_rollouts
from job_runs import CFG, SHORT, finished, job, metrics, start
from policy_models import write_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ONE = ()
TP2 = ("cluster.cpu_processes=2", f"{CFG}.tensor_model_parallel_size=2")
PP2_DP2 = ("cluster.cpu_processes=4", f"{CFG}.pipeline_model_parallel_size=2")
TP2_PP2 = ("cluster.cpu_processes=4", f"{CFG}.tensor_model_parallel_size=2", f"{CFG}.pipeline_model_parallel_size=2")
CP2 = ("cluster.cpu_processes=2", f"{CFG}.context_parallel_size=2")
EP2 = ("cluster.cpu_processes=2", f"{CFG}.expert_model_parallel_size=2")
DP2 = ("cluster.cpu_processes=2",)


@pytest.fixture(scope="module")
def run_in(tmp_path_factory):
    """The short run in a layout, made once."""
    return cache(lambda layout: finished(tmp_path_factory.mktemp("run") / "run", *SHORT, *layout))


@pytest.mark.parametrize(
    ("layout", "sampler_weights", "processes"),
    [(TP2, "copy", "2"), (CP2, "copy", "2"), (DP2, "shared", "2"), (PP2_DP2, "copy", "4")],
    ids=["TP2", "CP2", "DP2", "PP2-DP2"],
)
def test_the_first_step_is_that_of_one_process(run_in, layout, sampler_weights, processes):
    run = run_in(layout)
    same_first_step(run, run_in(ONE))
    backends = json.loads((run / "manifest.json").read_text())["backends"]
    assert (backends["sampler_weights"], backends["processes"]) == (sampler_weights, processes)


def same_first_step(run: Path, alone: Path) -> None:
    """The same draws token for token, and float32 rounding in what is computed from them."""
    drawn, expected_drawn = ([r.token_ids for r in read_rollouts(RunFolder(path), 1)] for path in (run, alone))
    assert len(drawn) == 128 and drawn == expected_drawn
    assert metrics(run, "val", 0) == metrics(alone, "val", 0)
    found, expected = metrics(run, "train", 1), metrics(alone, "train", 1)
    assert expected["train/grad_norm"] > 0.01
    for name in ("train/reward", "train/advantage_abs_mean", "train/valid_tokens", "train/weight_version"):
        assert found[name] == expected[name], name
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/kl", "train/ratio_mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    # The sampler's weights are the trainer's after a refit, too: the second step finds them together again.
    assert metrics(run, "train", 2)["train/weight_version"] == 1.0
    assert metrics(run, "train", 2)["train/logprob_diff_max"] < 1e-4


def test_experts_spread_over_two_processes(tmp_path):
    """A random Qwen3-MoE with six experts is asked for sums of one digit, which it hits by luck. Both processes sample
    with all six."""
    write_model("qwen3_moe", tmp_path / "model", vocab_size=16, pad_token_id=0, bos_token_id=None)
    digits = [
        f"data.{split}.task_args.{bound}_digits=1" for split in ("train", "validation") for bound in ("min", "max")
    ]
    guesses = (
        *SHORT,
        f"policy.model_name={tmp_path / 'model'}",
        "policy.tokenizer.name=recipe:tiny_arith/model",
        "policy.generation.max_new_tokens=1",
        *digits,
        "data.validation.size=64",
    )
    alone, run = finished(tmp_path / "one", *guesses), finished(tmp_path / "run", *guesses, *EP2)
    same_first_step(run, alone)


def test_tensor_and_pipeline_parallel_together_learn(tmp_path):
    """Thirty steps of the real recipe's size. Chance alone moves 512 judged answers by 2 points."""
    run = finished(tmp_path / "run", "grpo.max_num_steps=30", "grpo.val_period=0", "grpo.val_greedy=false", *TP2_PP2)
    accuracy = dict(series(read_metrics(run / "metrics.jsonl"), "val/accuracy"))
    assert accuracy[30] >= accuracy[0] + 0.1


def test_a_killed_worker_ends_the_job_with_its_rank_and_the_run_goes_on(run_in, tmp_path):
    """Covers: a rank that dies leaves the others waiting. Resumed, the run ends like one that was left alone."""
    run = start(tmp_path / "killed", *SHORT, "checkpointing.save_period=1", *TP2)
    ended = job(run, "1", "1", program=[str(Path(__file__).with_name("killed_worker.py"))])
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "error: rank 1 of 2 (process " in ended.stderr
    assert "was killed by SIGKILL (out of memory?) during train" in ended.stderr
    assert "Traceback" not in ended.stderr
    progress = json.loads((run / "progress.json").read_text())
    assert progress["status"] == "failed" and progress["message"].startswith("error: rank 1 of 2")
    done = job(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from step 1" in done.stdout
    assert metrics(run, "train", 2) == metrics(run_in(TP2), "train", 2)
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (run, run_in(TP2))]
    assert weights[0] == weights[1]
