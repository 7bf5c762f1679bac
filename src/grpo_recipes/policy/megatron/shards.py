"""The pieces of parameters in a trainer's checkpoint, as data: what was cut how, and which file holds which elements.

Knows nothing of Megatron and of process groups, so that a checkpoint can be read anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.mapping import Heads, Kind, merge, shard, split, unshard

FORMAT = 2
MODEL_FILE = "model.json"
STATES = ("param", "exp_avg", "exp_avg_sq")  # "param": the float32 weights
ANOTHER = "resume from another checkpoint"


@dataclass(frozen=True)
class Part:
    """What one tensor-parallel rank holds of a Megatron parameter."""

    hf: tuple[str, ...]  # Hugging Face tensors that make up the parameter, in the order in which they merge
    kind: Kind
    cut_along: int | None  # dimension; None where every tensor-parallel rank has the whole parameter
    rank: int  # in the group that the parameter is cut over; 0 where it is not cut
    size: int  # of that group; 1 where it is not cut
    shape: tuple[int, ...]  # of the part

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of a flattened part, which one data-parallel rank wrote."""

    part: Part
    start: int
    stop: int
    trained: bool = True  # false for frozen parameters: no moments


@dataclass(frozen=True)
class ModelHeader:
    """What the checkpoint says of the model as a whole (model.json).

    Attributes:
        world_size: ranks that wrote, one file each.
        scheduler_steps: optimizer steps that the learning-rate schedule has counted.
        plan: (name, shape, dtype) of every Hugging Face tensor of an export, in the order of the export.
        dtype: of the model's own weights, by torch name.
    """

    world_size: int
    scheduler_steps: int
    heads: Heads
    vocab_size: int
    dtype: str
    plan: tuple[tuple[str, tuple[int, ...], str], ...]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> ModelHeader:
        """Raises UserError if it is missing, damaged or of another format."""
        path = folder / MODEL_FILE
        if not path.is_file():
            if (folder / rank_file(0)).is_file():
                raise UserError(
                    f"a checkpoint of an earlier format than {FORMAT}",
                    where=str(folder),
                    mend="go on with the version of grpo-recipes that wrote it",
                )
            raise UserError("a file of the checkpoint is missing", where=str(path), mend=ANOTHER)
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"damaged checkpoint: {error}", where=str(path), mend=ANOTHER) from error
        check_format(content, path)
        plan = tuple((name, tuple(shape), dtype) for name, shape, dtype in content["plan"])
        return cls(
            content["world_size"],
            content["scheduler_steps"],
            Heads(**content["heads"]),
            content["vocab_size"],
            content["dtype"],
            plan,
        )


def check_format(content: Mapping[str, Any], path: Path) -> None:
    if content.get("format") != FORMAT:
        raise UserError(
            f"a trainer checkpoint of format {content.get('format')}, this version reads format {FORMAT}",
            where=str(path),
            mend="go on with the version of grpo-recipes that wrote it",
        )


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def rank_header(shards: Sequence[Shard], optimizer_steps: int) -> dict[str, str]:
    """The metadata of a rank's file. Tensor n of state s is named "s/n"."""
    content = {"format": FORMAT, "optimizer_steps": optimizer_steps, "shards": [asdict(piece) for piece in shards]}
    return {"state": json.dumps(content)}


class SavedState:
    """All files of a checkpoint, opened; tensors are read as they are asked for.

    Raises UserError for a file that is missing, damaged or of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = ModelHeader.read(folder)
        self.files = [_open(folder / rank_file(rank)) for rank in range(self.model.world_size)]
        self.optimizer_steps = 0  # a rank may own no shard at all
        self._pieces: dict[tuple[str, int], list[tuple[Shard, int, int]]] = {}
        self._keys: list[frozenset[str]] = []
        for rank, file in enumerate(self.files):
            header = json.loads((file.metadata() or {}).get("state", "{}"))
            check_format(header, folder / rank_file(rank))
            self.optimizer_steps = max(self.optimizer_steps, header["optimizer_steps"])
            self._keys.append(frozenset(file.keys()))
            for number, entry in enumerate(header["shards"]):
                piece = _shard(entry)
                self._pieces.setdefault((piece.part.hf[0], piece.part.rank), []).append((piece, rank, number))

    # -- parameters and moments ---------------------------------------------------------------------------------
    def check(self, state: str, wanted: Part, begin: int, end: int) -> None:
        """Raises UserError unless `read` with the same arguments will find every element, once."""
        name = wanted.hf[0]
        first = self._first(name)
        if (first.hf, first.kind) != (wanted.hf, wanted.kind) or self._shape(first) != self._shape(wanted):
            raise UserError(
                f"{name} is {first.kind} {self._shape(first)} in the checkpoint, {wanted.kind} {self._shape(wanted)} "
                "in the model",
                where=str(self.folder),
                mend="resume with the model that the checkpoint was written from",
            )
        if _same_cut(first, wanted):
            self._check_part(state, name, wanted.rank, begin, end)
        else:
            for rank in range(first.size):
                self._check_part(state, name, rank, 0, first.elements)

    def read(self, state: str, wanted: Part, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of a part, flattened, whatever the cut they were written under; float32."""
        name = wanted.hf[0]
        first = self._first(name)
        if _same_cut(first, wanted):
            return self._read_part(state, name, wanted.rank, begin, end)
        whole = self.whole(state, name)
        if wanted.cut_along is None:
            return whole.reshape(-1)[begin:end]
        if wanted.kind == "vocab":  # the padding depends on the tensor-parallel size
            whole = merge("vocab", [whole], self.model.heads, wanted.shape[0] * wanted.size)
        return shard(wanted.kind, whole, wanted.cut_along, wanted.rank, wanted.size).reshape(-1)[begin:end]

    def whole(self, state: str, name: str) -> Tensor:
        """A whole Megatron tensor by the name of its first Hugging Face tensor, without vocabulary padding; float32."""
        first = self._first(name)
        parts = [self._read_part(state, name, r, 0, first.elements).view(first.shape) for r in range(first.size)]
        whole = parts[0] if first.cut_along is None else unshard(first.kind, parts, first.cut_along)
        return whole[: self.model.vocab_size] if first.kind == "vocab" else whole

    def check_weights(self) -> None:
        """Raises UserError unless `exported` will find every element of every tensor."""
        found = set()
        for name in {name for name, _ in self._pieces}:
            first = self._first(name)
            found |= set(first.hf)
            for rank in range(first.size):
                self._check_part("param", name, rank, 0, first.elements)
        lost = sorted({name for name, _, _ in self.model.plan} - found)
        if lost:
            raise UserError(f"the checkpoint has nothing for {lost[0]}", where=str(self.folder), mend=ANOTHER)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors, rounded as the model's own weights are, in the order of an export; one
        parameter of the model is held at a time."""
        dtypes = {name: getattr(torch, dtype) for name, _, dtype in self.model.plan}
        for name in dtypes:
            if (name, 0) not in self._pieces:
                continue  # came with the first tensor of its parameter
            first = self._first(name)
            tensors = split(first.kind, self.whole("param", name), self.model.heads, self.model.vocab_size)
            for hf, tensor in zip(first.hf, tensors, strict=True):
                yield hf, tensor.to(dtypes[hf])

    def _first(self, name: str) -> Part:
        """The part of tensor-parallel rank 0."""
        return self._find(name, 0)[0][0].part

    def _shape(self, part: Part) -> tuple[int, ...]:
        """Of the whole tensor, without vocabulary padding."""
        shape = list(part.shape)
        if part.cut_along is not None:
            shape[part.cut_along] *= part.size
        return (self.model.vocab_size, *shape[1:]) if part.kind == "vocab" else tuple(shape)

    def _find(self, name: str, tensor_rank: int) -> list[tuple[Shard, int, int]]:
        if (name, tensor_rank) not in self._pieces:
            raise UserError(f"the checkpoint has nothing for {name}", where=str(self.folder), mend=ANOTHER)
        return self._pieces[name, tensor_rank]

    def _check_part(self, state: str, name: str, tensor_rank: int, begin: int, end: int) -> None:
        reached = begin
        for piece, rank, number in sorted(self._find(name, tensor_rank), key=lambda found: found[0].start):
            if piece.stop <= begin or piece.start >= end or piece.start == piece.stop:
                continue
            if state != "param" and not piece.trained:
                raise UserError(
                    f"{name} was frozen when the checkpoint was written: it has no {state} there",
                    where=str(self.folder),
                    mend="resume with the settings that the run began with",
                )
            key = f"{state}/{number}"
            self._check_key(rank, key)
            if max(piece.start, begin) != reached or self._shape_of(rank, key) != [piece.stop - piece.start]:
                reached = -1
                break
            reached = min(piece.stop, end)
        if reached != end:
            raise UserError(
                f"the checkpoint does not hold every element of {state} of {name} exactly once",
                where=str(self.folder),
                mend=ANOTHER,
            )

    def _shape_of(self, rank: int, key: str) -> list[int]:
        return self.files[rank].get_slice(key).get_shape()

    def _read_part(self, state: str, name: str, tensor_rank: int, begin: int, end: int) -> Tensor:
        result = torch.empty(end - begin)
        for piece, rank, number in self._find(name, tensor_rank):
            start, stop = max(begin, piece.start), min(end, piece.stop)
            if start < stop:
                saved = self.files[rank].get_slice(f"{state}/{number}")
                result[start - begin : stop - begin] = saved[start - piece.start : stop - piece.start]
        return result

    # -- tensors that one rank wrote ----------------------------------------------------------------------------
    def _check_key(self, rank: int, key: str) -> None:
        if key not in self._keys[rank]:
            raise UserError(f"the checkpoint lacks {key}", where=str(self.folder / rank_file(rank)), mend=ANOTHER)

    def tensor(self, rank: int, key: str) -> Tensor:
        self._check_key(rank, key)
        return self.files[rank].get_tensor(key)

    def has(self, rank: int, key: str) -> bool:
        return key in self._keys[rank]

    def buffer(self, name: str) -> Tensor:
        """A tensor of the model that is no parameter, by its name in the whole model; one rank wrote it."""
        key = f"buffer/{name}"
        ranks = [rank for rank, keys in enumerate(self._keys) if key in keys]
        if not ranks:
            raise UserError(f"the checkpoint lacks {key}", where=str(self.folder), mend=ANOTHER)
        return self.tensor(ranks[0], key)


def difference(saved: ModelHeader, model: ModelHeader) -> str | None:
    """In what the model of a checkpoint differs from another, or None: names, shapes and heads."""
    left, right = ({name: shape for name, shape, _ in header.plan} for header in (saved, model))
    for names, text in ((right.keys() - left.keys(), "lacks"), (left.keys() - right.keys(), "has")):
        if names:
            return f"it {text} {min(names)}" + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
    for name, shape in right.items():
        if left[name] != shape:
            return f"{name} is {_by(left[name])} in the checkpoint, {_by(shape)} in the model"
    if saved.heads != model.heads:
        return f"its attention has {saved.heads}, the model's has {model.heads}"
    return None


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _same_cut(saved: Part, wanted: Part) -> bool:
    return replace(saved, rank=0) == replace(wanted, rank=0)


def _shard(entry: Mapping[str, Any]) -> Shard:
    part = entry["part"]
    return Shard(
        Part(tuple(part["hf"]), part["kind"], part["cut_along"], part["rank"], part["size"], tuple(part["shape"])),
        entry["start"],
        entry["stop"],
        entry["trained"],
    )


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError("a file of the checkpoint is missing", where=str(path), mend=ANOTHER)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"damaged checkpoint: {error}", where=str(path), mend=ANOTHER) from error
