"""Advantages of a group of responses to one prompt. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards_GN: Tensor, valid_GN: Tensor, *, leave_one_out: bool, normalize: bool) -> Tensor:
    """Reward minus a baseline from the same group, optionally over its standard deviation.

    The baseline is the mean of the group's valid rewards: of all of them (GRPO, arXiv:2402.03300, section 4.1), or of
    the others (leave-one-out, arXiv:2402.14740, equation 7). The deviation is taken over the same set of rewards, with
    Bessel's correction; where it is zero or has fewer than two rewards to stand on, the advantage is not divided.

    Args:
        rewards_GN: float [G groups, N responses].
        valid_GN: bool [G, N]; invalid responses take no part and get advantage 0.
        leave_one_out: exclude a response from its own baseline and deviation.
        normalize: divide by the standard deviation.

    Returns:
        float32 [G, N]; 0 in a group with fewer than two valid rewards.
    """
    valid = valid_GN.double()
    rewards = torch.where(valid_GN, rewards_GN.double(), 0.0)
    own = valid if leave_one_out else torch.zeros_like(valid)
    count = valid.sum(1, keepdim=True) - own
    mean = (rewards.sum(1, keepdim=True) - own * rewards) / count.clamp(min=1)
    advantages = rewards - mean
    if normalize:
        # Deviations from a mean, not E[x^2] - E[x]^2: equal rewards must give exactly zero.
        member_GNM = valid[:, None, :] * (1 - torch.eye(valid.shape[1], dtype=torch.float64) * float(leave_one_out))
        deviation_GNM = (rewards[:, None, :] - mean[:, :, None]) * member_GNM
        variance = deviation_GNM.square().sum(2) / (count - 1).clamp(min=1)
        usable = (variance > 1e-16) & (count > 1)
        advantages = torch.where(usable, advantages / variance.clamp(min=1e-16).sqrt(), advantages)
    enough = valid.sum(1, keepdim=True) >= 2
    return torch.where(valid_GN & enough, advantages, 0.0).float()


def zero_variance_groups(rewards_GN: Tensor, valid_GN: Tensor) -> Tensor:
    """bool [G]: groups whose valid rewards are all equal (or fewer than two): they say nothing about what is better."""
    highest = torch.where(valid_GN, rewards_GN, -torch.inf).amax(1)
    lowest = torch.where(valid_GN, rewards_GN, torch.inf).amin(1)
    return highest <= lowest
