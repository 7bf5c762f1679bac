import pytest
import torch

from grpo_recipes.engine.metrics import expert_load_metrics, refit_throughput, reward_metrics, training_metrics
from grpo_recipes.engine.mismatch import Mismatch
from grpo_recipes.engine.refit import RefitStats
from grpo_recipes.policy.contract import TrainStats

MISMATCH = Mismatch(1.5, 0.25, 0.26, 0.06, 1.1, 2.0, 1.7, 1.0, 1.0, 0.0, 0.0, ())


def stats(skipped: bool, tokens: float) -> TrainStats:
    sums = {"tokens": tokens, "clipped": 2.0, "ratio": 1.5 * tokens, "entropy": 0.5 * tokens}
    return TrainStats(3.0, 4.0, 1e-3, skipped, sums, {"ratio": 9.0 if skipped else 2.0})


def test_skipped_optimizer_steps_take_no_part_in_means():
    found = training_metrics([stats(False, 10), stats(True, 30), stats(False, 40)], MISMATCH, 80)
    assert found["train/ratio_mean"] == 1.5 and found["train/entropy"] == 0.5 and found["train/ratio_max"] == 2.0
    assert found["train/clip_fraction"] == pytest.approx(4 / 50)
    assert found["train/bad_steps"] == 1.0 and found["train/valid_tokens"] == 80.0


def test_a_step_without_a_taken_optimizer_step_has_no_token_means():
    found = training_metrics([stats(True, 10)], MISMATCH, 10)
    assert "train/ratio_mean" not in found and found["train/bad_steps"] == 1.0


def test_no_judgement_is_no_reward():
    """Covers: a grader that fails everywhere, shown as a reward of 0."""
    rewards, invalid = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool)
    found = reward_metrics(rewards, invalid, rewards, torch.ones(2, dtype=torch.bool), ["no"] * 4)
    assert "train/reward" not in found and found["train/grader_errors"] == 4.0


def test_expert_load_is_the_mean_over_optimizer_steps():
    stats = [TrainStats(0.0, 0.0, 0.0, False, {}, {}, ((0.0, 0.0), load)) for load in ((0.5, 1.5), (1.0, 1.0))]
    assert expert_load_metrics(stats, each=False) == {"train/expert_load_max": 1.25, "train/expert_load_min": 0.75}
    each = expert_load_metrics(stats, each=True)
    assert each["train/expert_load/layer_1/expert_0"] == 0.75
    assert "train/expert_load/layer_0/expert_0" not in each  # a layer without experts
    assert expert_load_metrics([TrainStats(0.0, 0.0, 0.0, False, {}, {})], each=True) == {}


def test_refit():
    plain = RefitStats(bytes=3_000_000_000, seconds=2.0, tensors=7, certified=False)
    assert refit_throughput(plain) == {"refit_bytes": 3e9, "refit_tensors": 7.0, "refit_gb_per_s": 1.5}
    certified = RefitStats(3_000_000_000, 2.0, 7, True, largest_gap=0.25, certify_seconds=0.5)
    assert refit_throughput(certified) == {
        **refit_throughput(plain),
        "refit_certify": 0.5,
        "refit_probe_gap": 0.25,
    }
    assert refit_throughput(RefitStats(0, 0.0, 0, False)) == {}  # nothing was moved
    assert refit_throughput(None) == {}
