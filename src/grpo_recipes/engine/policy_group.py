"""The policy as the driver sees it: one object over all ranks. Ships a batch once, then names the work by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_recipes.cluster.contract import WorkerGroup
from grpo_recipes.engine.packing import assign_ranks
from grpo_recipes.engine.worker import Microbatches
from grpo_recipes.generation.contract import Completion, Request
from grpo_recipes.policy.contract import Batch, Loss, TrainStats, WeightSpec, empty_batch

if TYPE_CHECKING:
    from torch import Tensor

Cut = Callable[[Sequence[int]], Microbatches]

POLL = 64  # completions fetched per call


@dataclass(frozen=True)
class Mismatch:
    """Trainer against sampler, means over the generated tokens of a batch."""

    token_mult_prob_error: float
    gen_kl_error: float
    logprob_diff_max: float


class PolicyGroup:
    """All ranks of a policy.

    Args:
        workers: one `Worker` per rank, every rank a data-parallel one.
        cut_train, cut_logprob: from the lengths of a rank's sequences to its microbatches of indices.
    """

    def __init__(self, workers: WorkerGroup, *, cut_train: Cut, cut_logprob: Cut) -> None:
        self.workers = workers
        self.data_parallel = workers.world_size
        self.cut_train, self.cut_logprob = cut_train, cut_logprob

    def load_batch(self, batch: Batch, optimizer_steps: Sequence[Sequence[int]]) -> None:
        """Give each data-parallel rank its sequences, and decide every microbatch of the coming step."""
        lengths = batch.lengths.tolist()
        members: list[list[int]] = [[] for _ in range(self.data_parallel)]
        self._train: list[list[Microbatches]] = []  # [optimizer step][rank]
        for step in optimizer_steps:
            shares = assign_ranks([lengths[s] for s in step], self.data_parallel)
            local_steps = []
            for rank, share in enumerate(shares):
                first = len(members[rank])
                members[rank] += [step[s] for s in share]
                bins = self.cut_train([lengths[step[s]] for s in share])
                local_steps.append([[first + i for i in bin_] for bin_ in bins])
            self._train.append(same_number(local_steps))
        self._logprob = same_number([self.cut_logprob([lengths[s] for s in m]) for m in members])
        self.workers.scatter("load_batch", [(batch.select(m) if m else empty_batch(),) for m in members])

    def compute_logprobs(self) -> Mismatch:
        sums = self.workers.scatter("compute_logprobs", [(m,) for m in self._logprob])
        tokens = sum(s["tokens"] for s in sums)
        return Mismatch(
            token_mult_prob_error=sum(s["mult_prob_error"] for s in sums) / tokens,
            gen_kl_error=sum(s["gen_kl_error"] for s in sums) / tokens,
            logprob_diff_max=max(s["max_difference"] for s in sums),
        )

    def compute_reference_logprobs(self) -> None:
        self.workers.scatter("compute_reference_logprobs", [(m,) for m in self._logprob])

    def train(self, step: int, loss: Loss) -> TrainStats:
        """One optimizer step of the loaded batch; the ranks agree on the result."""
        return self.workers.scatter("train", [(m, loss) for m in self._train[step]])[0]

    def save(self, folder: Path) -> None:
        self.workers.call("save", folder)

    def load(self, folder: Path) -> None:
        self.workers.call("load", folder)

    def export(self, folder: Path) -> None:
        self.workers.call("export", folder)

    def describe(self) -> dict[str, str]:
        return self.workers.call("describe")[0]

    def peak_memory(self) -> int:
        return max(self.workers.call("peak_memory"))


def same_number(per_rank: list[Microbatches]) -> list[Microbatches]:
    """Append empty microbatches until every rank has as many as the longest (and at least one)."""
    most = max(1, *(len(bins) for bins in per_rank))
    return [bins + [[]] * (most - len(bins)) for bins in per_rank]


class EmbeddedGenerator:
    """The Generator contract over samplers that live in the trainer's workers and share its weights: no refit copy."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers

    def submit(self, requests: Sequence[Request]) -> None:
        size = self.workers.world_size
        self.workers.scatter("submit", [(requests[rank::size],) for rank in range(size)])

    def completions(self) -> Iterator[Completion]:
        while found := [c for part in self.workers.call("poll", POLL) for c in part]:
            yield from found

    def pause(self) -> None:
        self.workers.call("pause")

    def resume(self, version: int) -> None:
        self.workers.call("resume", version)

    def take_version(self, version: int) -> None:
        """The trainer's weights are the sampler's: a refit is only told."""
        self.workers.call("take_version", version)

    def update_weights(self, plan: Sequence[WeightSpec], buckets: Iterator[dict[str, Tensor]], version: int) -> None:
        self.take_version(version)

    def sleep(self) -> None:
        self.workers.call("sleep")

    def wake(self) -> None:
        self.workers.call("wake")
