"""What the engine asks of a trainer, whatever library it is built on.

Every per-token array of a batch is aligned with the token it speaks of: ``logprobs_T[t]`` is the log-probability of
``token_ids[t]`` given the tokens of its sequence before it, and is 0 at the first token of a sequence. There is no
shifted copy anywhere outside a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences laid end to end. T tokens in all, S sequences; every tensor lives on the CPU until a policy moves it.

    A global batch, the share of one rank and a microbatch are all of this type; `select` cuts one from another.
    """

    token_ids: Tensor  # int64 [T], prompt then response of each sequence
    lengths: Tensor  # int64 [S], tokens of each sequence, sum T
    mask: Tensor  # bool [T], true where the token was generated and takes part in the loss
    weights: Tensor  # float32 [T], the token's share of the loss; zero off the mask (see engine.batch.loss_weights)
    advantages: Tensor  # float32 [T]
    sampler_logprobs: Tensor  # float32 [T], natural log, at the sampling temperature; 0 off the mask
    old_logprobs: Tensor | None = None  # float32 [T], by the policy before the first optimizer step of this batch
    reference_logprobs: Tensor | None = None  # float32 [T], by the frozen reference policy
    importance_weights: Tensor | None = None  # float32 [T], factors of the loss (engine.importance); None: all 1

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [S + 1], where each sequence starts, and T."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    def select(self, sequences: Sequence[int]) -> Batch:
        """The named sequences in the named order."""
        starts = self.cu_seqlens.tolist()
        index = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in sequences])
        per_token = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "lengths"}
        cut: dict[str, Any] = {name: None if value is None else value[index] for name, value in per_token.items()}
        return Batch(lengths=self.lengths[torch.as_tensor(sequences)], **cut)


def empty_batch() -> Batch:
    """One sequence of two tokens that weighs nothing: what a rank runs when it has fewer microbatches than others."""
    zeros = torch.zeros(2)
    return Batch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        lengths=torch.tensor([2]),
        mask=torch.zeros(2, dtype=torch.bool),
        weights=zeros,
        advantages=zeros,
        sampler_logprobs=zeros,
        old_logprobs=zeros,
        reference_logprobs=zeros,
        importance_weights=zeros,
    )


def batch_of_prompt(token_ids: Sequence[int]) -> Batch:
    """One sequence that is only read."""
    zeros = torch.zeros(len(token_ids))
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        lengths=torch.tensor([len(token_ids)]),
        mask=torch.zeros(len(token_ids), dtype=torch.bool),
        weights=zeros,
        advantages=zeros,
        sampler_logprobs=zeros,
    )


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at: a whole microbatch (all its tokens, also under context parallelism)."""

    logprobs: Tensor  # float32 [T], with gradient, by the current weights, at the sampling temperature
    entropy: Tensor  # float32 [T], of the distribution each token was drawn from (nats); with gradient
    batch: Batch  # on the device of `logprobs`


@dataclass(frozen=True)
class LossOutputs:
    """loss: scalar to differentiate, already weighted (sums over microbatches and ranks to the loss of the step).

    sums: detached scalars that add up over microbatches and ranks; the driver divides by the counts it knows.
    maxima: detached scalars of which the largest over microbatches and ranks counts.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


Loss = Callable[[LossInputs], LossOutputs]


@dataclass(frozen=True)
class TrainStats:
    """One optimizer step, equal on every rank."""

    loss: float
    grad_norm: float  # L2 norm of the whole model's gradient before clipping
    learning_rate: float  # used by this step
    skipped: bool  # true if loss or gradient was not finite: weights, optimizer and scheduler are as before
    sums: dict[str, float]
    maxima: dict[str, float]
    # [layer][expert] tokens sent to an expert over an even share of its layer's tokens; empty for a dense model
    expert_load: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class WeightSpec:
    """One tensor of the static refit plan."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]  # full, unsharded, without vocabulary padding
    dtype: torch.dtype
    owner: tuple[int, ...]  # global ranks that together hold it
    bucket: int  # index of the bucket that carries it


@dataclass(frozen=True)
class Replica:
    """The copy of the model that a rank is part of: one data-parallel rank, whatever its tensor, pipeline and context
    parallel sizes."""

    data_rank: int
    data_size: int
    ranks: tuple[int, ...]  # global ranks that together hold it; the driver ships a batch to the first
    microbatch_multiple: int = 1  # a pass must have a multiple of so many microbatches (virtual pipeline stages)


Part = Literal["optimizer", "weights"]  # of a trainer's memory; the optimizer's is its state and the gradients


class Policy(Protocol):
    """One rank of a trainer. Unless said otherwise a method is collective: every rank calls it, in the same order.

    `microbatches`: this rank's share; all data-parallel ranks pass the same number (pad with `empty_batch`).
    """

    @property
    def replica(self) -> Replica:
        """Not collective."""

    @property
    def optimizer_steps(self) -> int:
        """Taken since the weights the run started from; skipped ones do not count. Not collective."""

    def share(self, batch: Batch | None) -> Batch:
        """Collective within the replica: its first rank passes the batch, the others None; all get it."""

    def train(self, microbatches: Sequence[Batch], loss: Loss) -> TrainStats:
        """Forward, backward and one optimizer step."""

    def logprobs(self, microbatches: Sequence[Batch], *, temperature: float | None = None) -> list[Tensor]:
        """float32 [T] on the CPU for each microbatch, by the current weights; at the sampling temperature unless said."""

    def reference_logprobs(self, microbatches: Sequence[Batch]) -> list[Tensor]:
        """As `logprobs`, by the weights the run started from."""

    def weight_plan(self) -> Sequence[WeightSpec]:
        """Static; equal on every rank. Not collective."""

    def weight_buckets(self) -> Iterator[dict[str, Tensor]]:
        """Full tensors by Hugging Face name, bucket by bucket in the plan's order."""

    def offload(self, part: Part) -> None:
        """Give this part's device memory back, its contents kept in host memory. Whatever needs it brings it back first:
        training and checkpoints need both parts, everything else the weights. Not collective."""

    def save(self, folder: Path) -> dict[str, str]:
        """Write model, optimizer, scheduler and random states into an existing empty folder.

        Returns the sha256 of each file that this rank wrote, by name. Raises OSError where the disk is full.
        """

    def start_save(self, folder: Path) -> None:
        """As `save`, but return once the state is copied to host memory: a thread writes it. Not collective."""

    def finish_save(self, *, wait: bool) -> dict[str, str] | None:
        """What `save` returns, once what `start_save` began on this rank is on disk; None while it is not, or where
        nothing was begun. Raises what writing raised. Not collective."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; raises UserError where anything is missing."""

    def describe(self) -> dict[str, str]:
        """What was chosen where there was a choice, for the manifest: attention, layer spec, device. Not collective."""

    def export(self, folder: Path) -> None:
        """Write config, safetensors and tokenizer as Hugging Face transformers reads them."""
