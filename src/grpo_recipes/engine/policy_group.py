"""The policy as the driver sees it: one object over all ranks. Ships a batch once, then names the work by index."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from grpo_recipes.cluster.contract import WorkerGroup
from grpo_recipes.engine.importance import Correction
from grpo_recipes.engine.mismatch import Mismatch, combine
from grpo_recipes.engine.packing import Microbatches, PackingStats, Strategy, cut_evenly, packing_stats, share
from grpo_recipes.generation.contract import Completion, Request
from grpo_recipes.policy.contract import Batch, Loss, Replica, TrainStats, empty_batch

T = TypeVar("T")


class PolicyGroup:
    """All ranks of a policy.

    Args:
        workers: one `Worker` per rank. The ranks of a replica of the model work on the same sequences.
        train_strategy, logprob_strategy: which sequences run together.
    """

    def __init__(self, workers: WorkerGroup, *, train_strategy: Strategy, logprob_strategy: Strategy) -> None:
        self.workers = workers
        self.replicas: list[Replica] = workers.call("replica")  # by rank
        self.data_parallel, self.multiple = self.replicas[0].data_size, self.replicas[0].microbatch_multiple
        self.train_strategy, self.logprob_strategy = train_strategy, logprob_strategy

    def load_batch(self, batch: Batch, optimizer_steps: Sequence[Sequence[int]]) -> PackingStats:
        """Give each data-parallel rank its sequences, and decide every microbatch of the coming step."""
        lengths = batch.lengths.tolist()
        members: list[list[int]] = [[] for _ in range(self.data_parallel)]
        self._train: list[list[Microbatches]] = []  # [optimizer step][rank]
        for step in optimizer_steps:
            shares = share([lengths[s] for s in step], self.data_parallel, self.train_strategy, self.multiple)
            shares = [[step[i] for i in part] for part in shares]
            cuts = cut_evenly([[lengths[s] for s in part] for part in shares], self.train_strategy, self.multiple)
            first = [len(m) for m in members]
            self._train.append([[[f + i for i in bin_] for bin_ in c] for f, c in zip(first, cuts, strict=True)])
            for rank, part in enumerate(shares):
                members[rank] += part
        self._members = members  # [data-parallel rank]: places of its sequences in the batch
        local = [[lengths[s] for s in m] for m in members]
        self._logprob = cut_evenly(local, self.logprob_strategy, self.multiple)
        parts = [batch.select(m) if m else empty_batch() for m in members]
        self.workers.scatter(  # one rank of each replica is sent its tokens, and hands them on
            "load_batch",
            [(parts[r.data_rank] if rank == r.ranks[0] else None,) for rank, r in enumerate(self.replicas)],
        )
        steps = [[[[n[i] for i in b] for b in c] for n, c in zip(local, cuts, strict=True)] for cuts in self._train]
        return packing_stats(steps, self.train_strategy, empty=len(empty_batch().token_ids))

    def compute_logprobs(self, correction: Correction | None) -> Mismatch:
        """Old logprobs of the loaded batch, and the weights that correct its losses."""
        found = self.workers.scatter("compute_logprobs", [(m, correction) for m in self._by_rank(self._logprob)])
        return combine(
            [
                found[rank].numbered(self._members[replica.data_rank])
                for rank, replica in enumerate(self.replicas)
                if rank == replica.ranks[0]
            ]
        )

    def compute_reference_logprobs(self) -> None:
        self.workers.scatter("compute_reference_logprobs", [(m,) for m in self._by_rank(self._logprob)])

    def train(self, step: int, loss: Loss) -> TrainStats:
        """One optimizer step of the loaded batch; the ranks agree on the result."""
        return self.workers.scatter("train", [(m, loss) for m in self._by_rank(self._train[step])])[0]

    def _by_rank(self, per_replica: Sequence[T]) -> list[T]:
        return [per_replica[replica.data_rank] for replica in self.replicas]

    def save(self, folder: Path) -> dict[str, str]:
        """The sha256 of each file by name. Raises OSError where the disk is full."""
        return {name: digest for files in self.workers.call("save", folder) for name, digest in files.items()}

    def start_save(self, folder: Path) -> None:
        """As `save`, but every rank writes in a thread, from a copy of its state."""
        self.workers.call("start_save", folder)

    def finish_save(self, *, wait: bool) -> dict[str, str] | None:
        """What `save` returns, once every rank has written what `start_save` began; None while one has not."""
        digests: dict[str, str] = {}
        for files in self.workers.call("finish_save", wait):
            if files is None:
                return None
            digests |= files
        return digests

    def load(self, folder: Path) -> None:
        self.workers.call("load", folder)

    def export(self, folder: Path) -> None:
        self.workers.call("export", folder)

    def describe(self) -> dict[str, str]:
        """What was chosen where there was a choice, for the manifest."""
        return {**self.workers.call("describe")[0], "processes": str(self.workers.world_size)}

    def gpus(self) -> list[str]:
        """The name of each rank's GPU; none on CPUs."""
        return [name for name in self.workers.call("gpu") if name]

    def peak_memory(self) -> int:
        return max(self.workers.call("peak_memory"))


class EmbeddedGenerator:
    """The Generator contract over samplers that live in the trainer's workers, one on every rank."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers

    def submit(self, requests: Sequence[Request]) -> None:
        """Each rank gets consecutive requests: samples of one prompt are read together."""
        size, count = self.workers.world_size, len(requests)
        bounds = [count * rank // size for rank in range(size + 1)]
        self.workers.scatter("submit", [(requests[start:stop],) for start, stop in pairwise(bounds)])

    def completions(self) -> Iterator[Completion]:
        while found := self.poll(math.inf):
            yield from found

    def poll(self, seconds: float) -> list[Completion]:
        return [completion for part in self.workers.call("poll", seconds) for completion in part]

    def abort(self, request_ids: Sequence[int]) -> None:
        self.workers.call("abort", request_ids)

    def pause(self) -> None:
        self.workers.call("pause")

    def resume(self, version: int) -> None:
        self.workers.call("resume", version)

    def sleep(self) -> None:
        self.workers.call("sleep")

    def wake(self) -> None:
        self.workers.call("wake")
