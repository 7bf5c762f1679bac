"""What runs on every rank: a trainer, its replica's share of the current batch, and the embedded sampler."""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_recipes.engine.importance import Correction, importance_weights
from grpo_recipes.engine.mismatch import MismatchSums, mismatch_sums
from grpo_recipes.engine.packing import Microbatches
from grpo_recipes.engine.phases import peak_memory, reset_peak_memory
from grpo_recipes.generation.contract import Completion, Request, Sampler
from grpo_recipes.generation.sync.checksum import Checksums
from grpo_recipes.generation.sync.link import Link, Sender
from grpo_recipes.generation.sync.safetensors_folder import write_folder
from grpo_recipes.policy.contract import Batch, Loss, Policy, Replica, TrainStats, batch_of_prompt, empty_batch


@dataclass(frozen=True)
class EmbeddedReport:
    """Of one rank's refit: what its sampler's copy took. Nothing where it shares the trainer's parameters.

    handed, live: checksums, if certified, of what the copy was handed, and of what it holds after.
    """

    bytes: int
    tensors: int
    handed: dict[str, str] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)


class Worker:
    """Driven by calls from the driver, the same on every rank. The logprobs of a batch stay here.

    Args:
        sampler: the embedded one; None where sampling is another process's.
        copied: where the embedded sampler has a copy of the weights, all of them by Hugging Face name.
        sampler_weights: "shared" with the trainer's model, those of a "copy", with "vllm", or "none"; for the manifest.
    """

    def __init__(
        self,
        policy: Policy,
        sampler: Sampler | None,
        sampler_weights: Literal["shared", "copy", "vllm", "none"],
        copied: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
    ) -> None:
        self.policy = policy
        self._sampler, self.sampler_weights = sampler, sampler_weights
        self._copied = copied
        self._link: Sender | None = None

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
        return write_folder(folder, self.policy.weight_plan(), self.outgoing_buckets(), writes=writes)

    def open_link(self, transport: Link, receivers: int, host: str) -> tuple[Any, ...] | None:
        """The first rank waits for the samplers' workers: its Address as plain values. None on the others."""
        self._link = None
        if dist.is_initialized() and dist.get_rank():
            return None
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        host = host or socket.gethostbyname(socket.gethostname())
        self._link = Sender(transport, receivers, host=host, device=device)
        return astuple(self._link.address)

    def send_weights(self) -> int:
        """To whoever connects to the link. Every rank takes part; the first sends. Returns the bytes this rank sent."""
        buckets = self.outgoing_buckets()
        if self._link is None:
            for _ in buckets:
                pass
            return 0
        return self._link.send(self.policy.weight_plan(), buckets)

    def outgoing_buckets(self) -> Iterator[dict[str, Tensor]]:
        return self.policy.weight_buckets()

    def sum_weights(self) -> str:
        """Checksums of the live weights, gathered for this alone. A digest of all, to compare ranks by."""
        sums = Checksums()
        for bucket in self.policy.weight_buckets():
            for name, tensor in bucket.items():
                sums.add(name, tensor)
        self._sums = sums.result()
        return hashlib.sha256(repr(sorted(self._sums.items())).encode()).hexdigest()

    def weight_sums(self, wanted: bool = True) -> dict[str, str]:
        """What `sum_weights` found, by Hugging Face name; nothing where it is not wanted."""
        return self._sums if wanted else {}

    def probe_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Of every token but the first of each sequence, at temperature 1. Nothing but on the first rank."""
        batches = [batch_of_prompt(tokens) for tokens in sequences]
        batches += [empty_batch()] * (-len(batches) % self.policy.replica.microbatch_multiple)
        found = self.policy.logprobs(batches, temperature=1.0)[: len(sequences)]
        first = not dist.is_initialized() or dist.get_rank() == 0
        return [logprobs[1:].tolist() for logprobs in found] if first else []

    def submit(self, requests: Sequence[Request]) -> None:
        self.sampler.submit(requests)

    def poll(self, seconds: float) -> list[Completion]:
        return self.sampler.poll(seconds)

    def abort(self, request_ids: Sequence[int]) -> None:
        self.sampler.abort(request_ids)

    def resume(self, version: int) -> None:
        self.sampler.resume(version)

    def refit(self, version: int, certify: bool = False) -> EmbeddedReport:
        """Bring the trainer's weights to the embedded sampler."""
        plan, handed = self.policy.weight_plan(), Checksums()

        def followed() -> Iterator[dict[str, Tensor]]:
            for bucket in self.outgoing_buckets():
                for name, tensor in bucket.items():
                    handed.add(name, tensor)
                yield bucket

        self.sampler.update_weights(plan, followed() if certify else self.outgoing_buckets(), version)
        if self._copied is None:
            return EmbeddedReport(0, 0)
        sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in plan]
        live = Checksums()
        if certify:
            for name, tensor in self._copied():
                live.add(name, tensor)
        return EmbeddedReport(sum(sizes), len(sizes), handed.result(), live.result())

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

    def optimizer_steps(self) -> int:
        return self.policy.optimizer_steps

    def peak_memory(self) -> int:
        """Bytes at the highest point since the last call."""
        peak = peak_memory()
        reset_peak_memory()
        return peak
