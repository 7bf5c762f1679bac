"""Weights in and out by Hugging Face name, whatever part of them a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from grpo_recipes.errors import UserError
from grpo_recipes.policy.buckets import in_buckets
from grpo_recipes.policy.contract import WeightSpec
from grpo_recipes.policy.dtensor.names import Piece, experts_of, pieces
from grpo_recipes.policy.hf.folder import BUFFERS, TensorSource

BUCKET_BYTES = 256 * 2**20


class Weights:
    """The parameters of a model: sharded ones, or whole ones on every rank.

    Args:
        dtype: of the tensors that go out.
        device: on which they are put together.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
        self.parameters = dict(model.named_parameters())  # a tied output layer only as the embedding
        self.dtype, self._device = dtype, device
        self._tied = bool(model.config.tie_word_embeddings)
        config = model.config.to_dict()
        experts = experts_of(config)
        self.pieces = {name: list(pieces(config["model_type"], name, experts)) for name in self.parameters}
        self._plan = list(self._make_plan())

    def _make_plan(self) -> Iterator[WeightSpec]:
        everyone = tuple(range(dist.get_world_size()))
        bucket = filled = 0
        for name, parameter in self.parameters.items():
            size = parameter.numel() * self.dtype.itemsize
            if filled and filled + size > BUCKET_BYTES:
                bucket, filled = bucket + 1, 0
            filled += size
            for piece, shape in self._shapes(name):
                yield WeightSpec(piece.name, shape, self.dtype, everyone, bucket)

    def _shapes(self, name: str) -> Iterator[tuple[Piece, tuple[int, ...]]]:
        whole = torch.empty(self.parameters[name].shape, device="meta")
        for piece in self.pieces[name]:
            yield piece, tuple(piece.of(whole).shape)

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Fill this rank's part of every parameter, one at a time. Raises UserError for missing, misshapen or unknown
        tensors."""
        for name, parameter in self.parameters.items():
            self._fill(
                name, parameter, {piece.name: source.get(piece.name, shape) for piece, shape in self._shapes(name)}
            )
        if source.names is not None:
            self._refuse_unknown(source.names)

    @torch.no_grad()
    def take(self, bucket: Mapping[str, Tensor]) -> None:
        """Fill the parameters whose published tensors are in a bucket: the plan never splits those of one."""
        for name, parameter in self.parameters.items():
            if self.pieces[name][0].name in bucket:
                self._fill(name, parameter, bucket)

    def _fill(self, name: str, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        only = self.pieces[name]
        if len(only) == 1:
            whole = tensors[only[0].name]
        else:
            whole = torch.empty(parameter.shape, dtype=tensors[only[0].name].dtype)
            for piece in only:
                piece.of(whole).copy_(tensors[piece.name])
        local_part(parameter).copy_(part_of(whole, parameter))

    def _refuse_unknown(self, names: frozenset[str]) -> None:
        known = {piece.name for found in self.pieces.values() for piece in found}
        unknown = {n for n in names - known if not n.endswith(BUFFERS)}
        if self._tied:
            unknown.discard("lm_head.weight")
        if unknown:
            raise UserError(
                f"{len(unknown)} tensors belong to nothing in the model, such as {min(unknown)}", where="model folder"
            )

    def plan(self) -> list[WeightSpec]:
        """Static; equal on every rank."""
        return self._plan

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        """Collective. Full tensors; on one rank in float32 they are views of the parameters: copy what is to be kept."""
        return in_buckets(self._plan, self.gather())

    @torch.no_grad()
    def gather(
        self, of: Callable[[Tensor], Tensor | None] = torch.Tensor.detach, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Collective. Hugging Face name and full tensor on every rank, in the plan's order, one parameter at a time.

        Args:
            of: what to gather for a parameter: a tensor laid out like it, such as its gradient.
            dtype: of the results; left out, that of the plan.
        """
        for name, parameter in self.parameters.items():
            found = of(parameter)
            assert isinstance(found, DTensor)
            local = found.to_local().to(self._device, dtype or self.dtype)
            whole = like(found, local).full_tensor()
            for piece in self.pieces[name]:
                yield piece.name, piece.of(whole)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and tensor of a model that is whole on this rank. Not collective."""
        for name, parameter in self.parameters.items():
            for piece in self.pieces[name]:
                yield piece.name, piece.of(parameter.detach())


def local_part(parameter: Tensor) -> Tensor:
    """What this rank holds, sharing its memory."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def like(parameter: DTensor, local: Tensor) -> DTensor:
    """A DTensor laid out as `parameter` is, of other local parts."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor: cut over tensor parallel ranks, the last dimension of the mesh, first; then
    over those that FSDP2 shards over, as it did."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    for number in reversed(range(mesh.ndim)):
        dim = getattr(parameter.placements[number], "dim", None)  # None: not cut
        if dim is None:
            continue
        chunks, rank = whole.chunk(mesh.size(number), dim), mesh.get_local_rank(number)
        whole = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
    return whole
