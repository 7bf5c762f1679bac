import statistics

import pytest
import torch

from grpo_recipes.engine.advantages import group_advantages, zero_variance_groups

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 4.0, 6.0, 8.0]])
ALL = torch.ones(2, 4, dtype=torch.bool)


def test_group_mean_baseline_literal():
    got = group_advantages(REWARDS, ALL, leave_one_out=False, normalize=False)
    assert got.tolist() == [[0.5, -0.5, -0.5, 0.5], [-3.0, -1.0, 1.0, 3.0]]


def test_leave_one_out_baseline_literal():
    got = group_advantages(REWARDS, ALL, leave_one_out=True, normalize=False)
    expected = [[1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3], [2 - 6, 4 - 16 / 3, 6 - 14 / 3, 8 - 4]]
    torch.testing.assert_close(got, torch.tensor(expected))


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_normalised_against_the_statistics_module(leave_one_out):
    rewards = torch.rand(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = group_advantages(rewards, torch.ones(5, 6, dtype=torch.bool), leave_one_out=leave_one_out, normalize=True)
    for group, row in enumerate(rewards.tolist()):
        for n, reward in enumerate(row):
            others = row[:n] + row[n + 1 :] if leave_one_out else row
            expected = (reward - statistics.mean(others)) / statistics.stdev(others)
            assert got[group, n].item() == pytest.approx(expected, rel=1e-6)


def test_invalid_rewards_take_no_part():
    """Covers: a failed grader scored 0 in silence, which would move everybody's baseline."""
    valid = torch.tensor([[True, True, False, True]])
    got = group_advantages(REWARDS[:1], valid, leave_one_out=False, normalize=False)
    torch.testing.assert_close(got, torch.tensor([[1 / 3, -2 / 3, 0.0, 1 / 3]]))


def test_equal_rewards_give_exactly_zero():
    for value in (0.0, 1.0, 0.1):
        rewards = torch.full((3, 8), value)
        got = group_advantages(rewards, torch.ones(3, 8, dtype=torch.bool), leave_one_out=True, normalize=True)
        assert got.abs().max().item() < 1e-6


def test_a_lone_valid_reward_says_nothing():
    valid = torch.tensor([[True, False, False, False]])
    assert group_advantages(REWARDS[:1], valid, leave_one_out=True, normalize=True).tolist() == [[0, 0, 0, 0]]


def test_zero_variance_groups():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [5.0, 0.0], [0.0, 0.0]])
    valid = torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    assert zero_variance_groups(rewards, valid).tolist() == [True, False, True, True]
