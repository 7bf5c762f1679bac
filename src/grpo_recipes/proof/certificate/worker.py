"""A process of a certificate's pool: imports once, then builds the trainer anew for each layout it is asked for."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_recipes.policy.contract import Batch, TrainStats, empty_batch
from grpo_recipes.proof.certificate.faults import planted
from grpo_recipes.proof.certificate.reference import LOSS, STEPS, TEMPERATURE, Reference
from grpo_recipes.proof.certificate.shares import microbatches
from grpo_recipes.proof.certificate.verdict import CUTS, Cut, Measured
from grpo_recipes.recipe.schema import PolicyConfig

if TYPE_CHECKING:
    from grpo_recipes.cluster.contract import Placement
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

COLLECTIVE_LIMIT_S = 120  # a rank that waits this long for another will wait for ever


@dataclass(frozen=True)
class Job:
    """One layout, for its first `processes` workers; the others of the pool stand by."""

    number: int  # unlike any other job's of the pool
    processes: int
    policy: PolicyConfig
    checkpoint: Path
    reference: Reference
    small: float  # see Tolerances.gradient
    plant: str | None = None


class CertifyWorker:
    """Driven by `run`, the same on every rank."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        dist.destroy_process_group()  # the pool's own: each layout gets one of its size
        self.store = dist.TCPStore(  # type: ignore[attr-defined]  # absent from __all__
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        import grpo_recipes.policy.megatron.trainer  # noqa: F401  # now, not in the time of the first layout

    def run(self, job: Job) -> dict[Cut, Measured] | None:
        """Differences from the reference as this rank finds them; None on ranks that stand by."""
        if self.placement.rank >= job.processes:
            return None
        self._join(job)
        try:
            with planted(job.plant):
                return {cut: self._measure(job, cut) for cut in CUTS}
        finally:
            self._leave()

    def _join(self, job: Job) -> None:
        dist.init_process_group(
            "nccl" if self.placement.device.startswith("cuda") else "gloo",
            store=dist.PrefixStore(f"layout-{job.number}", self.store),
            rank=self.placement.rank,
            world_size=job.processes,
            timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
        )

    def _leave(self) -> None:
        from grpo_recipes.policy.megatron import parallel

        parallel.destroy()
        dist.destroy_process_group()

    def _measure(self, job: Job, cut: Cut) -> Measured:
        from safetensors.torch import load_file

        from grpo_recipes.policy.megatron.trainer import MegatronPolicy

        started = time.perf_counter()
        policy = MegatronPolicy(
            job.policy,
            temperature=TEMPERATURE,
            total_optimizer_steps=STEPS,
            model_folder=job.checkpoint,
        )
        reference = job.reference
        exact = load_file(reference.tensors)
        loaded = differences_of_weights(weights_of(policy), checkpoint_of(job.checkpoint), 0.0, None)
        first = self._microbatches(policy, reference.batches[0], cut)
        logprob = self._logprob_difference(policy, reference, cut)
        policy.accumulate(first, LOSS)
        gradients = differences_of_gradients(policy.gradients(), _part(exact, "gradient/"), job.small)
        stats = [policy.train(self._microbatches(policy, batch, cut), LOSS) for batch in reference.batches]
        rounding = torch.finfo(policy.built.config.params_dtype).eps
        weights = differences_of_weights(weights_of(policy), _part(exact, "weight/"), rounding, reference.changes)
        policy.close()
        return Measured(
            **_scalars(stats, reference),
            logprob=logprob,
            loaded=loaded,
            gradients=gradients,
            weights=weights,
            seconds=time.perf_counter() - started,
        )

    def _microbatches(self, policy: MegatronPolicy, batch: Batch, cut: Cut) -> list[Batch]:
        shared = policy.share(batch if dist.get_rank() == policy.replica.ranks[0] else None)
        return [shared.select(members) if members else empty_batch() for members in _members(policy, batch, cut)]

    def _logprob_difference(self, policy: MegatronPolicy, reference: Reference, cut: Cut) -> float:
        batch = reference.batches[0]
        exact = reference.logprobs.split(batch.lengths.tolist())
        found = policy.logprobs(self._microbatches(policy, batch, cut))
        members = _members(policy, batch, cut)
        return (
            max(
                _largest(logprobs.double() - torch.cat([exact[m] for m in microbatch]))
                for logprobs, microbatch in zip(found, members, strict=True)
                if microbatch
            )
            if any(members)
            else 0.0
        )


def _members(policy: MegatronPolicy, batch: Batch, cut: Cut) -> list[list[int]]:
    replica = policy.replica
    return microbatches(len(batch.lengths), replica.data_rank, replica.data_size, cut, replica.microbatch_multiple)


def _scalars(stats: list[TrainStats], reference: Reference) -> dict[str, float]:
    pairs = list(zip(stats, reference.steps, strict=True))
    return {
        "loss": max(_finite(abs(found.loss - exact.loss)) for found, exact in pairs),
        "grad_norm": max(_finite(abs(found.grad_norm - exact.grad_norm) / exact.grad_norm) for found, exact in pairs),
        "entropy": max(_finite(abs(found.sums["entropy"] / exact.entropy - 1)) for found, exact in pairs),
        "counts": max(
            max(abs(found.sums["tokens"] - exact.tokens), abs(found.sums["clipped"] - exact.clipped))
            for found, exact in pairs
        ),
    }


def differences_of_gradients(
    found: Mapping[str, Tensor], exact: Mapping[str, Tensor], small: float
) -> dict[str, float]:
    """Of each tensor, as Tolerances.gradient says; infinity for a name that only one of the two has."""
    largest = max(float(tensor.abs().max()) for tensor in exact.values())
    result = dict.fromkeys(found.keys() ^ exact.keys(), math.inf)
    for name in found.keys() & exact.keys():
        scale = max(float(exact[name].abs().max()), small * largest)
        result[name] = _largest(_like(found[name], exact[name]) - exact[name]) / scale
    return result


def differences_of_weights(
    found: Mapping[str, Tensor], exact: Mapping[str, Tensor], rounding: float, scales: Mapping[str, float] | None
) -> dict[str, float]:
    """Of each tensor beyond `rounding` times the weight, relative to its scale (absolute without scales)."""
    result = dict.fromkeys(found.keys() ^ exact.keys(), math.inf)
    for name in found.keys() & exact.keys():
        wanted = exact[name].double()
        beyond = (_like(found[name], wanted) - wanted).abs() - rounding * wanted.abs()
        result[name] = _largest(beyond.clamp(min=0)) / (1.0 if scales is None else scales[name])
    return result


def weights_of(policy: MegatronPolicy) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for bucket in policy.weight_buckets() for name, tensor in bucket.items()}


def checkpoint_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _like(found: Tensor, exact: Tensor) -> Tensor:
    """float64 on the CPU; not a number throughout where even the shape is wrong."""
    same = found.shape == exact.shape
    return found.detach().cpu().double() if same else torch.full_like(exact, math.nan, dtype=torch.float64)


def _largest(difference: Tensor) -> float:
    return _finite(float(difference.abs().max())) if difference.numel() else 0.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
