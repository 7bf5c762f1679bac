"""Importance weights against loops over single tokens."""

import math

import pytest
import torch

from grpo_recipes.engine.importance import Correction, importance_weights

# Three sequences: a prompt token, then generated ones; the last has none. d: trainer minus sampler logprob.
LENGTHS = torch.tensor([4, 3, 2])
MASK = torch.tensor([False, True, True, True, False, True, True, False, False])
D = [9.0, 0.5, -1.0, 0.2, 9.0, 1.0, 0.4, 9.0, 9.0]  # 9: prompt tokens, never read
SAMPLER = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0, -1.5, -0.7, 0.0, 0.0])
SEQUENCES = {1: (1, 2, 3), 5: (5, 6)}
LOW, HIGH = 0.6, 1.5


def weights(**options):
    trainer = SAMPLER + torch.tensor(D)
    trainer[0] = -math.inf  # a prompt token may be impossible
    return importance_weights(trainer, SAMPLER, MASK, LENGTHS, Correction(**options)).tolist()


def by_loop(level, bound):
    found = [1.0] * len(D)
    for members in SEQUENCES.values():
        mean = sum(D[t] for t in members) / len(members)
        for t in members:
            exponent = {"none": 0.0, "token": D[t], "sequence": mean * len(members), "geometric": mean}[level]
            weight = math.exp(exponent)
            if bound == "tis":
                weight = min(weight, HIGH)
            if bound == "icepop" and not LOW <= weight <= HIGH:
                weight = 0.0
            if bound == "seq-mask-tis" and not LOW <= math.exp(mean) <= HIGH:
                weight = 0.0
            found[t] = weight
    return found


@pytest.mark.parametrize("level", ["none", "token", "sequence", "geometric"])
@pytest.mark.parametrize("bound", [None, "tis", "icepop", "seq-mask-tis"])
def test_against_a_loop(level, bound):
    assert weights(level=level, bound=bound, low=LOW, high=HIGH) == pytest.approx(by_loop(level, bound), rel=1e-6)


def test_literals():
    # means -0.1 (0.9048) and 0.7 (2.0138)
    assert weights(bound="tis", high=1.2) == pytest.approx([1, 1.2, 0.3679, 1.2, 1, 1.2, 1.2, 1, 1], abs=1e-4)
    assert weights(bound="icepop", low=0.5, high=1.5) == pytest.approx([1, 0, 0, 1.2214, 1, 0, 1.4918, 1, 1], abs=1e-4)
    masked = weights(bound="seq-mask-tis", low=0.5, high=2.0)
    assert masked == pytest.approx([1, 1.6487, 0.3679, 1.2214, 1, 0, 0, 1, 1], abs=1e-4)
    assert weights(level="geometric") == pytest.approx([1, *[0.9048] * 3, 1, *[2.0138] * 2, 1, 1], abs=1e-4)


def test_sequences_that_are_too_far_off_are_masked():
    # mean exp|d|: (1.6487 + 2.7183 + 1.2214) / 3 = 1.8628 and (2.7183 + 1.4918) / 2 = 2.1051
    assert weights(level="none", max_sequence_error=2.0) == [1, 1, 1, 1, 1, 0, 0, 1, 1]
    assert weights(level="none", max_sequence_error=1.5) == [1, 0, 0, 0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_sequences_weights_do_not_depend_on_what_lies_beside_it(level):
    """Covers: a batch cut differently trains differently."""
    trainer = SAMPLER + torch.tensor(D)
    whole = importance_weights(trainer, SAMPLER, MASK, LENGTHS, Correction(level, "seq-mask-tis", LOW, 3.0))
    cuts = zip(*(x.split(LENGTHS.tolist()) for x in (trainer, SAMPLER, MASK)), LENGTHS.split(1), strict=True)
    alone = [importance_weights(*cut, Correction(level, "seq-mask-tis", LOW, 3.0)) for cut in cuts]
    assert torch.equal(whole, torch.cat(alone))


def test_the_expectation_under_the_sampler_is_that_under_the_trainer():
    """What makes the correction right: the sum over a vocabulary of sampler x weight x value, by enumeration."""
    sampler = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
    value = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    one = torch.ones(3, dtype=torch.int64)
    weight = importance_weights(trainer.log(), sampler.log(), one.bool(), one, Correction())
    torch.testing.assert_close((sampler * weight * value).sum(), (trainer * value).sum(), atol=1e-6, rtol=0)
