"""What runs on every rank: a trainer, its replica's share of the current batch, and the embedded sampler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_recipes.engine.importance import Correction, importance_weights
from grpo_recipes.engine.mismatch import MismatchSums, mismatch_sums
from grpo_recipes.engine.packing import Microbatches
from grpo_recipes.engine.phases import peak_memory, reset_peak_memory
from grpo_recipes.generation.contract import Completion, Request, Sampler
from grpo_recipes.generation.sync.safetensors_folder import write_folder
from grpo_recipes.policy.contract import Batch, Loss, Policy, Replica, TrainStats, empty_batch


class Worker:
    """Driven by calls from the driver, the same on every rank. The logprobs of a batch stay here.

    Args:
        sampler: the embedded one; None where sampling is another process's.
        sampler_weights: "shared" with the trainer's model, those of a "copy", with "vllm", or "none"; for the manifest.
    """

    def __init__(
        self, policy: Policy, sampler: Sampler | None, sampler_weights: Literal["shared", "copy", "vllm", "none"]
    ) -> None:
        self.policy = policy
        self._sampler, self.sampler_weights = sampler, sampler_weights

    # -- training -----------------------------------------------------------------------------------------------
    def replica(self) -> Replica:
        return self.policy.replica

    def load_batch(self, batch: Batch | None) -> None:
        """The share of this rank's replica; None where another rank of it is sent the batch."""
        self.batch = self.policy.share(batch)

    def compute_logprobs(self, microbatches: Microbatches, correction: Correction | None) -> MismatchSums:
        """Fill old_logprobs and importance_weights, and say how far the former are from the sampler's."""
        old = self._per_token(microbatches, self.policy.logprobs)
        batch = self.batch
        weights = correction and importance_weights(old, batch.sampler_logprobs, batch.mask, batch.lengths, correction)
        self.batch = replace(batch, old_logprobs=old, importance_weights=weights)
        return mismatch_sums(self.batch)

    def compute_reference_logprobs(self, microbatches: Microbatches) -> None:
        found = self._per_token(microbatches, self.policy.reference_logprobs)
        self.batch = replace(self.batch, reference_logprobs=found)

    def train(self, microbatches: Microbatches, loss: Loss) -> TrainStats:
        return self.policy.train([self._cut(members) for members in microbatches], loss)

    def _cut(self, members: Sequence[int]) -> Batch:
        return self.batch.select(members) if members else empty_batch()

    def _per_token(self, microbatches: Microbatches, compute: Callable[[list[Batch]], list[Tensor]]) -> Tensor:
        lengths = self.batch.lengths.tolist()
        per_sequence: dict[int, Tensor] = {}
        results = compute([self._cut(members) for members in microbatches])
        for members, logprobs in zip(microbatches, results, strict=True):
            pieces = logprobs.split([lengths[m] for m in members]) if members else ()
            per_sequence.update(zip(members, pieces, strict=True))
        # A rank without work holds one sequence that is in no microbatch.
        return torch.cat([per_sequence.get(s, torch.zeros(lengths[s])) for s in range(len(lengths))])

    # -- generation ----------------------------------------------------------------------------------------------
    @property
    def sampler(self) -> Sampler:
        assert self._sampler is not None, "this worker only trains"
        return self._sampler

    def write_weights(self, folder: Path) -> int:
        """Every rank takes part; the first writes. Returns the bytes this rank wrote."""
        writes = not dist.is_initialized() or dist.get_rank() == 0
        return write_folder(folder, self.policy.weight_plan(), self.policy.weight_buckets(), writes=writes)

    def submit(self, requests: Sequence[Request]) -> None:
        self.sampler.submit(requests)

    def poll(self, seconds: float) -> list[Completion]:
        return self.sampler.poll(seconds)

    def abort(self, request_ids: Sequence[int]) -> None:
        self.sampler.abort(request_ids)

    def resume(self, version: int) -> None:
        self.sampler.resume(version)

    def refit(self, version: int) -> None:
        self.sampler.update_weights(self.policy.weight_plan(), self.policy.weight_buckets(), version)

    def pause(self) -> None:
        self.sampler.pause()

    def sleep(self) -> None:
        self.sampler.sleep()

    def wake(self) -> None:
        self.sampler.wake()

    # -- state ---------------------------------------------------------------------------------------------------
    def save(self, folder: Path) -> dict[str, str]:
        return self.policy.save(folder)

    def start_save(self, folder: Path) -> None:
        self.policy.start_save(folder)

    def finish_save(self, wait: bool) -> dict[str, str] | None:
        return self.policy.finish_save(wait=wait)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)

    def export(self, folder: Path) -> None:
        self.policy.export(folder)

    def describe(self) -> dict[str, str]:
        return {
            **self.policy.describe(),
            "sampler_weights": self.sampler_weights,
            "threads": str(torch.get_num_threads()),
        }

    def gpu(self) -> str:
        """Its name; empty on a CPU."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    def peak_memory(self) -> int:
        """Bytes at the highest point since the last call."""
        peak = peak_memory()
        reset_peak_memory()
        return peak
