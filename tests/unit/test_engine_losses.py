import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from grpo_recipes.engine.losses import clipped_surrogate, cross_entropy_loss, kl_estimate, policy_loss
from grpo_recipes.policy.contract import Batch, LossInputs, empty_batch

T = 12
MASK = torch.tensor([False, False, True, True, True, True] * 2)


def inputs_at(logprobs, *, reference=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    old = torch.randn(T, generator=g, dtype=torch.float64) * 0.3 - 1
    batch = Batch(
        token_ids=torch.zeros(T, dtype=torch.int64),
        lengths=torch.tensor([6, 6]),
        mask=MASK,
        weights=MASK / MASK.sum().double(),
        advantages=torch.randn(T, generator=g, dtype=torch.float64) * MASK,
        sampler_logprobs=old + 0.01 * torch.randn(T, generator=g, dtype=torch.float64),
        old_logprobs=old,
        importance_weights=torch.rand(T, generator=g) + 0.5,
        reference_logprobs=old + 0.2 * torch.randn(T, generator=g, dtype=torch.float64) if reference else None,
    )
    return LossInputs(logprobs=logprobs, entropy=torch.zeros(T, dtype=torch.float64), batch=batch)


def start(seed=3):
    # Off the old logprobs, so that clips are active for some tokens and not for others.
    return (
        inputs_at(None).batch.old_logprobs + 0.4 * torch.randn(T, generator=torch.Generator().manual_seed(seed))
    ).detach()


def test_clipped_surrogate_literals():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 5.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    loss, active = clipped_surrogate(ratio, advantage, clip_min=0.2, clip_max=0.28, dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([-1.28, 1.5, -0.5, 0.8, 3.0]))
    assert active.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_are_zero_at_equality_and_of_the_right_sign(kind):
    """Covers: KL of the wrong sign. Exact expectation over a small vocabulary, by enumeration."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    expected = (p * kl_estimate(p.log(), q.log(), kind)).sum()
    if kind == "k2":  # biased, of the same order
        assert 0.5 * exact < expected < 2 * exact
    else:
        torch.testing.assert_close(expected, exact)
    assert kl_estimate(p.log(), p.log(), kind).abs().max() == 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dual", [None, 1.5])
def test_gradient_against_finite_differences(kind, dual):
    """Covers: biased k3 gradient. Central differences in float64."""
    loss = partial(
        policy_loss,
        clip_min=0.2,
        clip_max=0.28,
        dual_clip=dual,
        kl_penalty=0.7,
        kl_type=kind,
    )
    at = start().requires_grad_()
    loss(inputs_at(at)).loss.backward()
    for t in range(T):
        up, down = at.detach().clone(), at.detach().clone()
        up[t] += 1e-6
        down[t] -= 1e-6
        slope = (loss(inputs_at(up)).loss - loss(inputs_at(down)).loss) / 2e-6
        assert at.grad[t].item() == pytest.approx(slope.item(), abs=1e-8)


def test_loss_value_by_hand():
    inputs = inputs_at(start())
    batch = inputs.batch
    total = 0.0
    for t in range(T):
        if MASK[t]:
            ratio = math.exp(inputs.logprobs[t] - batch.old_logprobs[t])
            a = float(batch.advantages[t])
            kl = float(batch.reference_logprobs[t] - inputs.logprobs[t])
            surrogate = -min(a * ratio, a * min(max(ratio, 0.8), 1.28))
            total += float(batch.importance_weights[t]) * surrogate + 0.05 * (math.exp(kl) - 1 - kl)
    got = policy_loss(inputs, clip_min=0.2, clip_max=0.28, dual_clip=None, kl_penalty=0.05, kl_type="k3")
    assert got.loss.item() == pytest.approx(total / 8)


def test_ratio_is_exactly_one_when_nothing_has_changed():
    inputs = inputs_at(inputs_at(None).batch.old_logprobs.clone())
    got = policy_loss(inputs, clip_min=0.2, clip_max=0.2, dual_clip=None, kl_penalty=0.0, kl_type="k3")
    assert got.sums["ratio"].item() == 8 and got.maxima["ratio"].item() == 1 and got.sums["clipped"].item() == 0


def test_nothing_off_the_mask_matters_even_if_infinite():
    """A prompt token of probability 0 has logprob -inf and must not turn the loss or its gradient into NaN."""
    at = start()
    at[0] = -math.inf
    at.requires_grad_()
    inputs = inputs_at(at)
    inputs = replace(
        inputs,
        batch=replace(inputs.batch, old_logprobs=inputs.batch.old_logprobs.index_fill(0, torch.tensor([0]), -math.inf)),
    )
    got = policy_loss(inputs, clip_min=0.2, clip_max=0.2, dual_clip=None, kl_penalty=0.1, kl_type="k3")
    got.loss.backward()
    assert got.loss.isfinite() and at.grad.isfinite().all() and at.grad[0] == 0


def test_cross_entropy():
    inputs = inputs_at(start())
    assert cross_entropy_loss(inputs).loss.item() == pytest.approx(-inputs.logprobs[MASK].mean().item())


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_every_rank_reports_the_same_statistics(penalty):
    """Covers: a rank with fewer microbatches fails. What runs in place of work names the same sums as work does."""
    loss = partial(
        policy_loss,
        clip_min=0.2,
        clip_max=0.2,
        dual_clip=None,
        kl_penalty=penalty,
        kl_type="k3",
    )
    idle = empty_batch()
    worked = loss(inputs_at(start(), reference=penalty > 0))
    waited = loss(LossInputs(logprobs=torch.zeros(2), entropy=torch.zeros(2), batch=idle))
    assert worked.sums.keys() == waited.sums.keys()
    assert waited.loss == 0 and all(value == 0 for value in waited.sums.values())
