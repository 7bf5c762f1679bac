"""The trainer's state on disk: float32 weights, both Adam moments, step counts, buffers and random states, as
safetensors.

Every rank writes the shards that its distributed optimizer owns, into one file of its own, and gathers nothing; of
ranks that hold the same elements one writes them. Tensors are named by Hugging Face name and carry where they lie, so
that a checkpoint loads under other tensor-, pipeline-, data-, context- and expert-parallel sizes. Megatron's
dist_checkpointing is not used: PyTorch's reader below it unpickles `.metadata` without weights_only, it starts a
process for every first save, and its loading of torch's Adam goes wrong without an error (all parameters end up sharing
one `step` tensor, so that a second step counts several times).

Weights in the model's own dtype are not stored: they are the float32 weights, rounded. Frozen parameters, which have no
float32 copy, are stored as they are, widened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from grpo_recipes.errors import UserError
from grpo_recipes.policy.host_copy import HostCopy
from grpo_recipes.policy.megatron.optimizer import distributed_optimizers
from grpo_recipes.policy.megatron.optimizer_state import OptimizerState
from grpo_recipes.policy.megatron.shards import (
    MODEL_FILE,
    STATES,
    ModelHeader,
    Part,
    SavedState,
    Shard,
    difference,
    rank_file,
    rank_header,
)
from grpo_recipes.policy.safetensors_stream import write_stream

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from grpo_recipes.policy.megatron.weights import Placed, WeightMap


@dataclass(frozen=True)
class Trained:
    """What a checkpoint is of, on this rank."""

    weights: WeightMap
    chunks: list[GPTModel]
    model: list[DistributedDataParallel]  # the same chunks, wrapped
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


class Owned(NamedTuple):
    """Elements [begin, end) of a parameter: those whose optimizer state this rank holds, or all of a frozen one."""

    placed: Placed
    state: OptimizerState | None  # None for a frozen parameter
    begin: int
    end: int


@dataclass(frozen=True)
class Contents:
    """What this rank writes."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    model: ModelHeader

    def write(self, folder: Path) -> dict[str, str]:
        """The sha256 of each file by name. Raises OSError where the disk is full or refuses."""
        rank = dist.get_rank()
        digests = {rank_file(rank): write_stream(folder / rank_file(rank), self.tensors, self.metadata)}
        if rank == 0:
            text = self.model.to_json()
            (folder / MODEL_FILE).write_text(text)
            digests[MODEL_FILE] = hashlib.sha256(text.encode()).hexdigest()
        return digests


class CheckpointWriter:
    """Saves the trainer's state, in the foreground or in a thread. The copy in host memory that the thread writes from
    is kept for the next save: at most one copy of this rank's shards, none before the first save in the background."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self._host = HostCopy()
        self._writing: Future[dict[str, str]] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def save(self, folder: Path) -> dict[str, str]:
        """Collective. `folder` exists and is empty; the sha256 of each file that this rank wrote, by name.

        Raises OSError where the disk is full or refuses.
        """
        self.finish(wait=True)
        digests = contents_of(self.trained).write(folder)
        dist.barrier()
        return digests

    def start(self, folder: Path) -> None:
        """As `save`, but returns once the state is copied to host memory. Waits for the save before. Not collective."""
        self.finish(wait=True)
        contents = contents_of(self.trained)
        copied = Contents(self._host.take(contents.tensors), contents.metadata, contents.model)
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        self._writing = self._thread.submit(copied.write, folder)

    def finish(self, *, wait: bool) -> dict[str, str] | None:
        """What `save` returns, once all that `start` began on this rank is on disk; None while it is not, or where
        nothing was begun. Raises what writing raised."""
        if self._writing is None or not (wait or self._writing.done()):
            return None
        return self._writing.result()


def contents_of(trained: Trained) -> Contents:
    """The tensors are those of the live trainer."""
    tensors: dict[str, Tensor] = {f"rng/{name}": state for name, state in _rng_states().items()}
    if _writes_whole_copies(trained):
        tensors |= {f"buffer/{name}": buffer for name, buffer in _buffers(trained.chunks)}
    states = _states(trained)
    shards: list[Shard] = []
    for placed, state, begin, end in _owned(trained.weights, states):
        if state is None and not _first_of_copies(trained.weights, placed):
            continue
        if placed.is_copy or begin == end or (placed.cut_along is None and placed.cut_group.rank()):
            continue
        weights = {"param": placed.parameter.detach().float().reshape(-1)}
        for name, tensor in (weights if state is None else state.read(placed.parameter)).items():
            tensors[f"{name}/{len(shards)}"] = tensor
        shards.append(Shard(_part(placed), begin, end, trained=state is not None))
    steps = max((state.steps() for state in states), default=0)
    return Contents(tensors, rank_header(shards, steps), _header(trained))


@torch.no_grad()
def load(folder: Path, trained: Trained) -> None:
    """Collective. Raises UserError for a file or tensor that is missing or damaged, and for a checkpoint of another
    model, before anything is changed."""
    saved = SavedState(folder)
    different = difference(saved.model, _header(trained))
    if different:
        raise UserError(
            f"a checkpoint of another model: {different}",
            where=str(folder),
            mend="resume with the model that the checkpoint was written from",
        )
    states = _states(trained)
    everything = list(_owned(trained.weights, states))
    names = STATES if saved.optimizer_steps else STATES[:1]
    for placed, state, begin, end in everything:
        for name in STATES[:1] if state is None else names:
            saved.check(name, _part(placed), begin, end)
    buffers = [(buffer, saved.buffer(name)) for name, buffer in _buffers(trained.chunks)]
    random_states = _saved_rng_states(saved)

    for state in states:
        state.prepare(saved.optimizer_steps)
    for placed, state, begin, end in everything:
        if state is None:
            tensor = saved.read("param", _part(placed), begin, end)
            placed.parameter.copy_(tensor.view(placed.parameter.shape))
        else:
            tensors = {name: saved.read(name, _part(placed), begin, end) for name in names}
            state.write(placed.parameter, tensors, saved.optimizer_steps)
    for state in states:
        state.finish()
    for chunk in trained.model:
        chunk.start_param_sync(force_sync=True)
    for buffer, tensor in buffers:
        buffer.copy_(tensor)
    trained.scheduler.num_steps = saved.model.scheduler_steps
    trained.scheduler.step(0)
    _set_rng_states(random_states)
    dist.barrier()


def _header(trained: Trained) -> ModelHeader:
    weights = trained.weights
    return ModelHeader(
        world_size=dist.get_world_size(),
        scheduler_steps=trained.scheduler.num_steps,
        heads=weights.heads,
        vocab_size=weights.vocab_size,
        dtype=_torch_name(weights.dtype),
        plan=tuple((spec.name, tuple(spec.shape), _torch_name(spec.dtype)) for spec in weights.plan()),
    )


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _part(placed: Placed) -> Part:
    rule = placed.rule
    rank = 0 if placed.cut_along is None else placed.cut_group.rank()
    return Part(rule.hf, rule.kind, placed.cut_along, rank, placed.parts, tuple(placed.parameter.shape))


def _states(trained: Trained) -> list[OptimizerState]:
    return [OptimizerState(part) for part in distributed_optimizers(trained.optimizer)]


def _owned(weights: WeightMap, states: list[OptimizerState]) -> Iterator[Owned]:
    by_parameter = {placed.parameter: placed for placed in weights.placed.values()}
    for state in states:
        for parameter in state.part.model_param_group_index_map:
            span = state.part._get_model_param_range_map(parameter)["param"]
            yield Owned(by_parameter[parameter], state, span.start, span.end)
    for parameter, placed in by_parameter.items():
        if not parameter.requires_grad:
            yield Owned(placed, None, 0, parameter.numel())


def _first_of_copies(weights: WeightMap, placed: Placed) -> bool:
    """Whether this rank is the first of the data-parallel ranks that hold a frozen parameter."""
    is_expert = placed.cut_group is weights.groups.expt_tp
    return (weights.groups.expt_dp if is_expert else weights.groups.dp_cp).rank() == 0


def _writes_whole_copies(trained: Trained) -> bool:
    """Whether this rank is the first of those that hold the same layers."""
    groups = trained.weights.groups
    return groups.dp_cp.rank() == 0 and groups.tp.rank() == 0


def _buffers(chunks: list[GPTModel]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that training changes and that are no parameters, such as the router's expert bias, equal on every rank
    that holds the layer."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            persistent = layer.state_dict(keep_vars=True)
            for name, buffer in layer.named_buffers():
                if name in persistent:
                    yield f"decoder.layers.{layer.layer_number - 1}.{name}", buffer


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {f"tracker/{name}": state.cpu() for name, state in tracker.items()}


def _saved_rng_states(saved: SavedState) -> dict[str, Tensor]:
    """Random states belong to ranks: with another number of ranks each keeps those it was seeded with."""
    if saved.model.world_size != dist.get_world_size():
        return {}
    rank, now = dist.get_rank(), _rng_states()
    if saved.has(rank, "rng/cpu") and saved.has(rank, "rng/cuda") != ("cuda" in now):
        kinds = ("a GPU", "a CPU") if "cuda" not in now else ("a CPU", "a GPU")
        raise UserError(
            f"the checkpoint was written on {kinds[0]}, and this is {kinds[1]}: its random states mean nothing here",
            where=str(saved.folder),
            mend=f"resume on {kinds[0]}, or export the weights and start a run from them",
        )
    return {name: saved.tensor(rank, f"rng/{name}") for name in now}


def _set_rng_states(states: dict[str, Tensor]) -> None:
    if not states:
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    prefix = "tracker/"
    tracked = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
