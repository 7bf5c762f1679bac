"""Trainer against sampler: sums, their combination over replicas, and limits."""

import math
from dataclasses import replace

import pytest
import torch

from grpo_recipes.engine.mismatch import BatchRefused, check_limits, combine, mismatch_sums
from grpo_recipes.policy.contract import Batch, empty_batch
from grpo_recipes.recipe.schema import MismatchLimits

D = (0.3, -0.2, 0.0, 1.0)  # trainer minus sampler, of two generated tokens in each of two sequences


def batch(d=D):
    mask = torch.tensor([False, True, True, False, True, True])
    sampler = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5, -3.0])
    gap = torch.tensor([0.0, d[0], d[1], 0.0, d[2], d[3]])
    zeros = torch.zeros(6)
    return Batch(zeros.long(), torch.tensor([3, 3]), mask, zeros, zeros, sampler * mask, old_logprobs=sampler + gap)


def by_hand(d):
    """Means by the definitions, from the probabilities themselves."""
    n, names = len(d), ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error")
    mult = sum(math.exp(abs(x)) for x in d) / n
    gen = sum(math.exp(x) - x - 1 for x in d) / n
    policy = sum(math.exp(-x) + x - 1 for x in d) / n
    js = 0.0
    for x in d:
        sampler, trainer = 0.1, 0.1 * math.exp(x)
        middle = (sampler + trainer) / 2
        for p in (sampler, trainer):
            js += (middle / p - math.log(middle / p) - 1) / 2 / n
    return dict(zip(names, (mult, gen, policy, js), strict=True))


def test_definitions():
    found = combine([mismatch_sums(batch())])
    for name, value in by_hand(D).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-5), name
    assert found.sampling_importance_ratio == pytest.approx(sum(map(math.exp, D)) / 4, rel=1e-5)
    assert found.logprob_diff_max == pytest.approx(1.0)
    assert (found.importance_weight_mean, found.masked_token_fraction) == (1.0, 0.0)


def test_replicas_add_up_and_idle_ones_say_nothing():
    whole = combine([mismatch_sums(batch())])
    halves = [mismatch_sums(batch().select([s])).numbered([s]) for s in (1, 0)]
    idle = mismatch_sums(empty_batch()).numbered([])
    parts = combine([*halves, idle])
    assert parts.metrics() == pytest.approx(whole.metrics())
    assert [w.sequence for w in parts.worst] == [w.sequence for w in whole.worst] == [1, 0]
    assert parts.worst[0].error == pytest.approx((1 + math.e) / 2, rel=1e-5)
    assert parts.worst[0].logprobs.tolist() == pytest.approx([-0.5, -2.0])  # the trainer's, of generated tokens
    assert combine([idle]).token_mult_prob_error == 0.0  # of no token


def test_what_a_correction_masks_is_counted():
    weights = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 0.0])
    found = combine([mismatch_sums(replace(batch(), importance_weights=weights))])
    assert found.masked_token_fraction == 0.75
    assert found.masked_sequence_fraction == 0.5
    assert (found.importance_weight_mean, found.importance_weight_max) == (0.5, 2.0)


def test_a_limit_warns_or_ends_the_run():
    found = combine([mismatch_sums(batch())])  # token_mult_prob_error 1.57
    rows = [31, 17]  # of the training data
    assert check_limits(found, MismatchLimits(token_mult_prob_error={"warn": 2.0, "abort": 3.0}), 7, rows) == []
    [warning] = check_limits(found, MismatchLimits(token_mult_prob_error={"warn": 1.5}), 7, rows)
    assert "step 7" in warning and "1.572" in warning and "prompts of rows 17 (error 1.86, 2 tokens)" in warning
    with pytest.raises(BatchRefused, match="was not trained on") as caught:
        check_limits(found, MismatchLimits(sequence_mult_prob_error_max={"abort": 1.8}), 7, rows)
    assert "loss_fn.mismatch.sequence_mult_prob_error_max.abort = 1.8" in str(caught.value)


def test_a_value_that_is_no_number_is_above_every_limit():
    found = combine([mismatch_sums(batch()), mismatch_sums(batch((math.nan, 0.0, 0.0, 0.0)))])
    assert math.isnan(found.logprob_diff_max) and math.isnan(found.sequence_mult_prob_error_max)
    with pytest.raises(BatchRefused):
        check_limits(found, MismatchLimits(token_mult_prob_error={"abort": 100.0}), 1, [0, 0])
