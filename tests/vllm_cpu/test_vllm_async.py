"""A whole run with the real vLLM drawing while the trainer trains."""

import pytest

import job_runs
from grpo_recipes.runs.arrivals import read_arrivals
from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.metrics import read_metrics
from grpo_recipes.runs.rollout_store import read_stored

STEPS = 40
TOLERANCE = 1e-4  # natural log, float32 on both sides


@pytest.mark.timeout(1200)
def test_tiny_arith_learns_one_step_behind(tmp_path):
    """As in test_vllm_job: from about 0.5 to above 0.6, though every step but the first trains on older rollouts."""
    run = job_runs.finished(
        tmp_path / "run",
        "policy.generation.backend=vllm",
        "grpo.async_grpo.enabled=true",
        "grpo.async_grpo.in_flight_weight_updates=true",
        "loss_fn.use_importance_sampling_correction=true",
        "loss_fn.truncated_importance_sampling_type=tis",
        "loss_fn.truncated_importance_sampling_ratio=2.0",
        f"grpo.max_num_steps={STEPS}",
        "grpo.val_period=0",
        f"logger.num_rollout_steps_to_store={STEPS}",
    )
    rows = [row.metrics for row in read_metrics(run / "metrics.jsonl") if row.kind == "train"]
    rewards = [row["train/reward"] for row in rows]
    assert len(rewards) == STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05
    assert [row["train/trajectory_age_mean"] for row in rows] == [0.0] + [1.0] * (STEPS - 1)
    # The first batch is of the weights that train on it; later ones are of older weights, and the two differ.
    assert rows[0]["train/logprob_diff_max"] < TOLERANCE < rows[-1]["train/logprob_diff_max"]
    folder = RunFolder(run)
    order = {step: sorted(groups) for step, groups in read_arrivals(folder).items()}
    assert order == {step: list(range(64 * (step - 1), 64 * step)) for step in range(1, STEPS + 1)}
    for step in (2, 20, STEPS):
        stored = read_stored(folder, step)
        assert stored.weight_versions.max() <= stored.weight_version
        assert stored.weight_versions.min() == stored.weight_version - 4  # four optimizer steps are a step
