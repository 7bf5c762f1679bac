"""How the driver shares out a batch. The workers are stand-ins that keep what they are sent."""

import pytest
import torch

from grpo_recipes.engine.batch import Sample, make_batch
from grpo_recipes.engine.packing import Packed
from grpo_recipes.engine.policy_group import PolicyGroup
from grpo_recipes.policy.alignment import Alignment
from grpo_recipes.policy.contract import Replica

REPLICAS = [Replica(rank // 2, 2, (rank // 2 * 2, rank // 2 * 2 + 1), microbatch_multiple=2) for rank in range(4)]


class Workers:
    """Four ranks, two of which hold each of two copies of a model with two virtual pipeline stages."""

    world_size = 4

    def __init__(self):
        self.sent = {}

    def call(self, method, *args):
        assert method == "replica"
        return REPLICAS

    def scatter(self, method, arguments):
        self.sent[method] = [args[0] for args in arguments]
        return [None] * 4


@pytest.fixture
def loaded():
    lengths = [40, 3, 17, 30, 8, 25, 39, 12, 5, 21, 33]
    steps = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    samples = [
        Sample((n,), torch.full((length - 1,), n), torch.zeros(length - 1), 1.0) for n, length in enumerate(lengths)
    ]
    workers = Workers()
    strategies = [Packed(tokens, Alignment(4, 4), lambda n: n * (50 + n)) for tokens in (40, 60)]
    group = PolicyGroup(workers, train_strategy=strategies[0], logprob_strategy=strategies[1])
    stats = group.load_batch(make_batch(samples, steps, token_level=True), steps)
    return group, workers, lengths, steps, stats


def run(group, workers, step):
    group.train(step, None)
    return workers.sent["train"]


def test_one_rank_of_each_replica_is_sent_its_sequences(loaded):
    _, workers, lengths, _, _ = loaded
    sent = workers.sent["load_batch"]
    assert sent[1] is None and sent[3] is None
    tokens = [batch.token_ids.tolist() for batch in (sent[0], sent[2])]
    assert sorted(tokens[0] + tokens[1]) == [n for n, length in enumerate(lengths) for _ in range(length)]


def test_every_sequence_is_trained_once_in_its_own_optimizer_step(loaded):
    """Covers: a batch that does not divide is cut; uneven microbatch counts hang a rank."""
    group, workers, _, steps, _ = loaded
    batches = workers.sent["load_batch"][0], workers.sent["load_batch"][2]
    for step, members in enumerate(steps):
        passes = run(group, workers, step)
        assert passes[0] == passes[1] and passes[2] == passes[3]  # the ranks of a replica work together
        assert len(passes[0]) == len(passes[2]) and len(passes[0]) % 2 == 0
        trained = []
        for batch, microbatches in zip(batches, passes[::2], strict=True):
            for microbatch in microbatches:
                cut = [batch.select([i]) for i in microbatch]
                assert sum(-(-int(c.lengths[0]) // 4) * 4 for c in cut) <= 40
                trained += [int(c.token_ids[0]) for c in cut]
        assert sorted(trained) == members


def test_logprob_passes_are_as_many_on_every_rank_too(loaded):
    group, workers, *_ = loaded
    group.compute_reference_logprobs()
    passes = workers.sent["compute_reference_logprobs"]
    assert len({len(p) for p in passes}) == 1 and len(passes[0]) % 2 == 0
    for batch, microbatches in zip(workers.sent["load_batch"][::2], passes[::2], strict=True):
        assert sorted(i for m in microbatches for i in m) == list(range(len(batch.lengths)))


def test_stats_are_those_of_what_was_sent(loaded):
    """Reference: counted from the microbatches themselves."""
    group, workers, lengths, steps, stats = loaded
    batches = workers.sent["load_batch"][0], workers.sent["load_batch"][2]
    computed, worst, mean, number = 0, 0.0, 0.0, 0
    for step in range(len(steps)):
        work = []
        for batch, microbatches in zip(batches, run(group, workers, step)[::2], strict=True):
            taken = [[int(batch.lengths[i]) for i in m] or [2] for m in microbatches]
            computed += sum(-(-n // 4) * 4 for m in taken for n in m)
            work.append(sum(n * (50 + n) for m, t in zip(microbatches, taken, strict=True) if m for n in t))
            number += len(taken)
        worst, mean = worst + max(work), mean + sum(work) / 2
    assert stats.padding_fraction == pytest.approx(1 - sum(lengths) / computed)
    assert stats.rank_imbalance == pytest.approx(worst / mean - 1)
    assert stats.microbatches == number / 4
