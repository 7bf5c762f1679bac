"""Losses as pure functions of `LossInputs`. Every per-token term is summed with the batch's weights.

Bind the parameters with functools.partial; the result is the `Loss` that a policy calls on each microbatch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_recipes.policy.contract import LossInputs, LossOutputs

KLType = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor, kind: KLType) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens drawn by the policy, float [T], nats.

    Source: J. Schulman, "Approximating KL Divergence" (2020): k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r,
    with r = reference / policy probability.
    """
    log_r = reference_T - logprobs_T
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return log_r.square() / 2
    return torch.expm1(log_r) - log_r


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, *, clip_min: float, clip_max: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Per-token policy loss (to be minimised) and whether the clip was active (bool [T]).

    max(-A r, -A clip(r, 1 - clip_min, 1 + clip_max)): PPO, arXiv:1707.06347, equation 7, with the asymmetric range of
    DAPO, arXiv:2503.14476, equation 10. With dual_clip c, where A < 0 the loss is at most -A c (arXiv:1912.09729,
    equation 5).
    """
    plain = -advantages_T * ratio_T
    clipped = -advantages_T * ratio_T.clamp(1 - clip_min, 1 + clip_max)
    loss = torch.maximum(plain, clipped)
    active = clipped > plain
    if dual_clip is not None:
        bound = -advantages_T * dual_clip
        bounded = (advantages_T < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        active = active | bounded
    return loss, active


def policy_loss(
    inputs: LossInputs,
    *,
    clip_min: float,
    clip_max: float,
    dual_clip: float | None,
    kl_penalty: float,
    kl_type: KLType,
) -> LossOutputs:
    """GRPO: clipped policy loss plus kl_penalty times the KL to the reference policy.

    Each token's policy loss is multiplied by its importance weight where the batch has them (engine/importance.py).
    """
    batch, mask = inputs.batch, inputs.batch.mask
    assert batch.old_logprobs is not None, "logprobs() comes before train()"
    # Off the mask logprobs may be anything (prompt tokens, padding): the difference is set to 0 before exp.
    log_ratio = torch.where(mask, inputs.logprobs - batch.old_logprobs, 0.0)
    ratio = log_ratio.exp()
    loss_T, clipped = clipped_surrogate(
        ratio, batch.advantages, clip_min=clip_min, clip_max=clip_max, dual_clip=dual_clip
    )
    if batch.importance_weights is not None:
        loss_T = loss_T * batch.importance_weights
    sums = {
        "tokens": mask.sum(),
        "clipped": (clipped & mask).sum(),
        "ratio": ratio.detach()[mask].sum(),
        "entropy": inputs.entropy.detach()[mask].sum(),
    }
    if kl_penalty > 0:
        assert batch.reference_logprobs is not None, "reference_logprobs() comes before train()"
        reference = torch.where(mask, batch.reference_logprobs, 0.0)
        kl_T = torch.where(mask, kl_estimate(torch.where(mask, inputs.logprobs, 0.0), reference, kl_type), 0.0)
        loss_T = loss_T + kl_penalty * kl_T
        sums["kl"] = kl_T.detach().sum()
    ratios = ratio.detach()[mask]
    largest = ratios.max() if len(ratios) else torch.ones((), device=ratio.device)
    loss = (loss_T * batch.weights).sum()
    return LossOutputs(loss=loss, sums={k: v.double() for k, v in sums.items()}, maxima={"ratio": largest})


def cross_entropy_loss(inputs: LossInputs) -> LossOutputs:
    """Supervised: the weighted sum of the negative log-probabilities of the reference answer's tokens."""
    mask = inputs.batch.mask
    sums = {"entropy": inputs.entropy.detach()[mask].sum().double()}
    return LossOutputs(loss=-(inputs.logprobs * inputs.batch.weights).sum(), sums=sums, maxima={})
