"""Driver, replicas and ranks: who is sent what, and who is asked. Real processes, a stand-in for trainer and sampler."""

import functools
import math
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from grpo_recipes.cluster.process import ProcessGroup
from grpo_recipes.engine.importance import Correction
from grpo_recipes.engine.packing import Packed
from grpo_recipes.engine.policy_group import EmbeddedGenerator, PolicyGroup
from grpo_recipes.engine.worker import Worker
from grpo_recipes.generation.contract import Completion, Request, Sampling, generate
from grpo_recipes.policy.alignment import alignment
from grpo_recipes.policy.contract import Batch, Replica, TrainStats

pytestmark = pytest.mark.parity

WIDTH = 2  # ranks of a replica
LENGTHS = (5, 3, 4, 2)


class Policy:
    """Each sequence is named by its tokens, which are all alike. Logprobs are those of the sampler plus 1."""

    def __init__(self, rank, world):
        self.rank = rank
        first = rank - rank % WIDTH
        self.replica = Replica(rank // WIDTH, world // WIDTH, tuple(range(first, first + WIDTH)), microbatch_multiple=2)
        pairs = [dist.new_group(list(range(start, start + WIDTH))) for start in range(0, world, WIDTH)]
        self.pair = pairs[rank // WIDTH]
        self.shipped = []

    def share(self, batch):
        self.shipped.append(batch is not None)
        box = [batch]
        dist.broadcast_object_list(box, self.replica.ranks[0], group=self.pair)
        return box[0]

    def logprobs(self, microbatches):
        return [m.sampler_logprobs + 1 for m in microbatches]

    def train(self, microbatches, loss):
        names = [sorted(set(m.token_ids.tolist())) for m in microbatches]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, names)
        loss(names)
        return TrainStats(float(self.rank), 0.0, 0.0, False, {"seen": everyone}, {})

    def weight_plan(self):
        return ["plan"]

    def weight_buckets(self):
        for number in range(2):
            total = torch.ones(())
            dist.all_reduce(total)
            yield {f"tensor{number}": total}

    def describe(self):
        return {"rank": str(self.rank)}


@dataclass
class Sampler:
    rank: int
    queue: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)
    version: int = 0

    def submit(self, requests):
        self.queue += requests

    def poll(self, seconds):
        requests, self.queue = self.queue[:2], self.queue[2:]
        tokens, versions = torch.tensor([self.rank, self.version]), torch.zeros(2, dtype=torch.int32)
        return [Completion(r.request_id, tokens, torch.zeros(2), versions, "stop") for r in requests]

    def update_weights(self, plan, buckets, version):
        assert plan == ["plan"]
        for bucket in buckets:
            self.weights |= bucket
        self.version = version


class Spied(Worker):
    def shipped(self):
        return self.policy.shipped

    def held(self):
        return sorted(set(self.batch.token_ids.tolist()))

    def factors(self):
        """{name: factors of the loss of its generated tokens}"""
        names = set(self.batch.token_ids[self.batch.mask].tolist())
        chosen = {n: self.batch.mask & (self.batch.token_ids == n) for n in names}
        return {n: self.batch.importance_weights[mask].tolist() for n, mask in chosen.items()}

    def weights(self):
        return {name: tensor.item() for name, tensor in self.sampler.weights.items()}


def make(placement):
    return Spied(Policy(placement.rank, placement.world_size), Sampler(placement.rank), "copy")


def no_loss(names):
    assert names


def fail_on(name, names):
    if any(name in members for members in names):
        raise ValueError(f"planted for {name}")


def batch():
    lengths = torch.tensor(LENGTHS)
    token_ids = torch.arange(4).repeat_interleave(lengths)
    mask = torch.cat([torch.arange(n) > 0 for n in LENGTHS])
    zeros = torch.zeros(len(token_ids))
    return Batch(token_ids, lengths, mask, mask / mask.sum(), zeros, zeros)


def strategy():
    return Packed(8, alignment(1, 1, False), cost=lambda n: n)


def test_four_ranks_in_two_replicas():
    """Covers: an error on one rank hangs the others."""
    with ProcessGroup(make, 4, threads=1) as workers:
        group = PolicyGroup(workers, train_strategy=strategy(), logprob_strategy=strategy())
        assert (group.data_parallel, group.multiple) == (2, 2)
        group.load_batch(batch(), [[0, 1], [2, 3]])
        # A batch is sent to the first rank of each replica, and every rank of the replica has it in the end.
        assert workers.call("shipped") == [[True], [False], [True], [False]]
        held = workers.call("held")
        assert held[0] == held[1] and held[2] == held[3]
        assert sorted(held[0] + held[2]) == [0, 1, 2, 3]

        # 14 tokens, 10 of them generated, each counted once although two ranks of a replica report it.
        mismatch = group.compute_logprobs(None)
        assert mismatch.token_mult_prob_error == pytest.approx(2.718281828459045)
        assert mismatch.logprob_diff_max == 1.0

        # exp(generated tokens) of each sequence, at most exp(2.5), whichever rank and microbatch it is in.
        mismatch = group.compute_logprobs(Correction("sequence", "tis", high=math.exp(2.5)))
        expected = {0: [math.exp(2.5)] * 4, 1: [math.exp(2)] * 2, 2: [math.exp(2.5)] * 3, 3: [math.e]}
        factors = workers.call("factors")
        assert factors[0] == factors[1] and factors[2] == factors[3]
        found = factors[0] | factors[2]
        assert found.keys() == expected.keys()
        assert all(found[name] == pytest.approx(expected[name]) for name in expected)
        assert mismatch.importance_weight_mean == pytest.approx(sum(map(sum, expected.values())) / 10)
        assert sorted((w.sequence, w.tokens) for w in mismatch.worst) == [(0, 4), (1, 2), (2, 3), (3, 1)]

        stats = group.train(0, no_loss)
        assert stats.loss == 0.0  # rank 0's
        seen = stats.sums["seen"]
        assert seen[0] == seen[1] and seen[2] == seen[3]
        assert all(len(microbatches) == 2 for microbatches in seen)  # the replicas' multiple, filled up
        assert group.describe() == {"rank": "0", "sampler_weights": "copy", "threads": "1", "processes": "4"}
        assert group.gpus() == []

        # Every rank samples, neighbours together; a refit reaches all of them.
        generator = EmbeddedGenerator(workers)
        sampling = Sampling(1.0, 2, ())
        requests = [Request(n, (1,), n, sampling) for n in range(6)]
        assert [c.token_ids.tolist() for c in generate(generator, requests)] == [[r, 0] for r in (0, 1, 1, 2, 3, 3)]
        workers.call("refit", 7)
        assert workers.call("weights") == [{"tensor0": 4.0, "tensor1": 4.0}] * 4
        assert [c.token_ids[1].item() for c in generate(generator, requests[:1])] == [7]

        with pytest.raises(ValueError, match="planted for 3"):
            group.train(1, functools.partial(fail_on, 3))
