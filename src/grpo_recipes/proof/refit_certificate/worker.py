"""A rank of the trainer for the certificate of a refit: it trains on random tokens, and sends wrong weights if asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_recipes.engine.losses import cross_entropy_loss
from grpo_recipes.engine.worker import Worker
from grpo_recipes.errors import UserError
from grpo_recipes.policy.contract import Batch, Policy, WeightSpec
from grpo_recipes.recipe.schema import PolicyConfig

if TYPE_CHECKING:
    from grpo_recipes.cluster.contract import Placement

TOKENS = 48  # of a sequence
PLANTS = ("skipped", "old_weights", "swapped_tensors", "swapped_rows", "second_refit")


def check_plant(name: str | None) -> None:
    """Raises UserError for a fault that is not known."""
    if name is not None and name not in PLANTS:
        raise UserError(f"{name!r} is not a fault", where="--plant", mend=f"known: {', '.join(PLANTS)}")


def make_refit_worker(
    placement: Placement, *, policy: PolicyConfig, model_folder: Path, steps: int, plant: str | None = None
) -> RefitWorker:
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    trainer = MegatronPolicy(
        policy,
        temperature=policy.generation.temperature,
        total_optimizer_steps=steps,
        model_folder=model_folder,
        needs_reference=False,
        seed=0,
    )
    return RefitWorker(trainer, plant)


class RefitWorker(Worker):
    """Args: plant: of PLANTS; what is wrong with the weights that are sent."""

    def __init__(self, policy: Policy, plant: str | None = None) -> None:
        super().__init__(policy, None, "vllm")
        self.plant, self._steps = plant, 0
        self._old: dict[str, Tensor] = {}

    def step(self) -> list[str]:
        """One optimizer step on random tokens. Names of the tensors that it changed; every rank finds them all."""
        before = {name: tensor.clone() for bucket in self.policy.weight_buckets() for name, tensor in bucket.items()}
        self._steps += 1
        replica = self.policy.replica
        batches = [
            random_sequence(words_of(before), self._steps, replica.data_rank, number)
            for number in range(replica.microbatch_multiple)
        ]
        self.policy.train(batches, cross_entropy_loss)
        self._old = before
        after = {name: tensor for bucket in self.policy.weight_buckets() for name, tensor in bucket.items()}
        return [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]

    def outgoing_buckets(self) -> Iterator[dict[str, Tensor]]:
        names = [spec.name for spec in self.policy.weight_plan()]
        first, second = twins(self.policy.weight_plan())
        for bucket in super().outgoing_buckets():
            sent = dict(bucket)
            if self.plant == "skipped":
                sent.pop(names[-1], None)
            elif self.plant == "old_weights":
                sent = {name: self._old[name] for name in bucket}
            elif self.plant == "swapped_tensors" and first in bucket and second in bucket:
                sent[first], sent[second] = bucket[second], bucket[first]
            elif self.plant == "swapped_rows" and first in bucket:
                sent[first] = bucket[first][[1, 0, *range(2, len(bucket[first]))]]
            elif self.plant == "second_refit" and self._steps == 2 and names[-1] in bucket:
                sent[names[-1]] = bucket[names[-1]].clone()
                sent[names[-1]].view(-1)[-1] += 1
            yield sent


def twins(plan: Sequence[WeightSpec]) -> tuple[str, str]:
    """The names of two matrices of one shape in one bucket."""
    seen: dict[tuple[object, ...], str] = {}
    for spec in plan:
        kind = (spec.shape, spec.dtype, spec.bucket)
        if len(spec.shape) == 2 and kind in seen:
            return seen[kind], spec.name
        seen[kind] = spec.name
    raise AssertionError("no model is without two matrices of one shape")


def words_of(weights: dict[str, Tensor]) -> int:
    """Of the vocabulary."""
    return next(len(tensor) for name, tensor in weights.items() if "embed" in name)


def random_sequence(vocab_size: int, *seeds: int) -> Batch:
    draw = torch.Generator().manual_seed(hash(seeds) % 2**31)
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[0] = False
    zeros = torch.zeros(TOKENS)
    return Batch(
        token_ids=torch.randint(0, vocab_size, (TOKENS,), generator=draw),
        lengths=torch.tensor([TOKENS]),
        mask=mask,
        weights=mask / mask.sum(),
        advantages=zeros,
        sampler_logprobs=zeros,
    )
