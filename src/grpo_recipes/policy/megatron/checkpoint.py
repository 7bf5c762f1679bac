"""The trainer's state on disk: float32 weights, both Adam moments, step counts and random states, as safetensors.

Every rank writes the shards that its distributed optimizer owns, into one file of its own, and gathers nothing. Tensors
are named by Hugging Face name and carry where they lie, so that a checkpoint loads under other tensor-, pipeline- and
data-parallel sizes. Megatron's dist_checkpointing is not used: PyTorch's reader below it unpickles `.metadata` without
weights_only, it starts a process for every first save, and its loading of torch's Adam goes wrong without an error (all
parameters end up sharing one `step` tensor, so that a second step counts several times).

Weights in the model's own dtype are not stored: they are the float32 weights, rounded.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.folder import write_safetensors
from grpo_recipes.policy.hf.mapping import merge, shard, split, unshard
from grpo_recipes.policy.megatron.optimizer import distributed_optimizers

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from grpo_recipes.policy.megatron.weights import Placed, WeightMap

FORMAT = 1
STATES = ("param", "exp_avg", "exp_avg_sq")  # "param": the float32 weights


@dataclass(frozen=True)
class Shard:
    """A run of elements of one parameter, as its tensor-parallel rank holds it, flattened."""

    name: str
    tensor_rank: int
    start: int
    stop: int
    shape: tuple[int, ...]  # of the tensor-parallel rank's whole part


def save(folder: Path, weights: WeightMap, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> None:
    """Collective. `folder` exists and is empty. Raises OSError where the disk is full or refuses."""
    tensors: dict[str, Tensor] = {f"rng/{name}": state for name, state in _rng_states().items()}
    shards: list[Shard] = []
    steps = 0
    for part, placed, begin, end in _owned(weights, optimizer):
        held = part._get_main_param_and_optimizer_states(placed.parameter)
        steps = _steps(part, held)
        if placed.is_copy:
            continue
        rank = parallel_state.get_tensor_model_parallel_rank()
        piece = Shard(placed.rule.hf[0], rank, begin, end, tuple(placed.parameter.shape))
        for state in STATES:
            if state in held:
                tensors[f"{state}/{len(shards)}"] = held[state].detach().to("cpu", copy=True).contiguous()
        shards.append(piece)
    header = {
        "format": FORMAT,
        "world_size": dist.get_world_size(),
        "tensor_parallel": weights.tp,
        "optimizer_steps": steps,
        "scheduler_steps": scheduler.num_steps,
        "shards": [asdict(piece) for piece in shards],
    }
    write_safetensors(tensors, folder / _file(dist.get_rank()), {"state": json.dumps(header)})
    dist.barrier()


@torch.no_grad()
def load(
    folder: Path,
    weights: WeightMap,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Collective. Raises UserError for a file or tensor that is missing or damaged, before anything is changed."""
    saved = _Saved(folder)
    found = [
        (part, placed, {state: saved.read(state, weights, placed, begin, end) for state in saved.states})
        for part, placed, begin, end in _owned(weights, optimizer)
    ]
    random_states = saved.random_states()
    for part in distributed_optimizers(optimizer):
        _prepare_state(part, saved.optimizer_steps)
    for part, placed, tensors in found:
        if saved.optimizer_steps and "step" in part._get_main_param_and_optimizer_states(placed.parameter):
            tensors["step"] = torch.tensor(float(saved.optimizer_steps))
        part._set_main_param_and_optimizer_states(placed.parameter, tensors)
    for part in distributed_optimizers(optimizer):
        part._copy_main_params_to_model_params()
    for chunk in model:
        chunk.start_param_sync(force_sync=True)
    scheduler.num_steps = saved.scheduler_steps
    scheduler.step(0)
    _set_rng_states(random_states)
    dist.barrier()


class _Saved:
    """All files of a checkpoint, opened; tensors are read as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        first = self._open(0)
        self.files = [first] + [self._open(rank) for rank in range(1, self._header(first)["world_size"])]
        headers = [self._header(file) for file in self.files]
        self.world_size, self.tp = headers[0]["world_size"], headers[0]["tensor_parallel"]
        # A rank may own no shard at all.
        self.optimizer_steps = max(h["optimizer_steps"] for h in headers)
        self.scheduler_steps = headers[0]["scheduler_steps"]
        self.states = STATES if self.optimizer_steps else STATES[:1]
        self.shards: dict[tuple[str, int], list[tuple[Shard, Any, int]]] = {}
        for file, header in zip(self.files, headers, strict=True):
            for number, entry in enumerate(header["shards"]):
                piece = Shard(**entry | {"shape": tuple(entry["shape"])})
                self.shards.setdefault((piece.name, piece.tensor_rank), []).append((piece, file, number))

    def _open(self, rank: int) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self.folder / _file(rank)
        if not path.is_file():
            raise UserError(
                "a file of the checkpoint is missing", where=str(path), mend="resume from another checkpoint"
            )
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"damaged checkpoint: {error}", where=str(path), mend="resume from another one") from error

    def _header(self, file: Any) -> dict[str, Any]:
        header = json.loads((file.metadata() or {}).get("state", "{}"))
        if header.get("format") != FORMAT:
            raise UserError(f"not a trainer checkpoint of format {FORMAT}", where=str(self.folder))
        return header

    def read(self, state: str, weights: WeightMap, placed: Placed, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of this rank's part of a parameter, flattened; float32."""
        name = placed.rule.hf[0]
        rank = parallel_state.get_tensor_model_parallel_rank()
        if self.tp == weights.tp or placed.cut_along is None:
            return self._part(state, name, rank if self.tp == weights.tp else 0, begin, end)
        whole = self._whole(state, weights, placed)
        return shard(placed.rule.kind, whole, placed.cut_along, rank, weights.tp).reshape(-1)[begin:end]

    def _whole(self, state: str, weights: WeightMap, placed: Placed) -> Tensor:
        kind, name = placed.rule.kind, placed.rule.hf[0]
        parts = []
        for rank in range(self.tp):
            shape = self._find(name, rank)[0][0].shape
            parts.append(self._part(state, name, rank, 0, torch.Size(shape).numel()).view(shape))
        whole = unshard(kind, parts, placed.cut_along)
        if kind != "vocab":
            return whole
        rows = placed.parameter.shape[0] * weights.tp  # the padding depends on the tensor-parallel size
        return merge(kind, split(kind, whole, weights.heads, weights.vocab_size), weights.heads, rows)

    def _find(self, name: str, tensor_rank: int) -> list[tuple[Shard, Any, int]]:
        if (name, tensor_rank) not in self.shards:
            raise UserError(f"the checkpoint has nothing for {name}", where=str(self.folder))
        return self.shards[name, tensor_rank]

    def _part(self, state: str, name: str, tensor_rank: int, begin: int, end: int) -> Tensor:
        result = torch.empty(end - begin)
        missing = end - begin
        for piece, file, number in self._find(name, tensor_rank):
            start, stop = max(begin, piece.start), min(end, piece.stop)
            if start < stop:
                result[start - begin : stop - begin] = self._tensor(file, f"{state}/{number}")[
                    start - piece.start : stop - piece.start
                ]
                missing -= stop - start
        if missing:
            raise UserError(f"the checkpoint holds only a part of {state} of {name}", where=str(self.folder))
        return result

    def _tensor(self, file: Any, key: str) -> Tensor:
        if key not in file.keys():  # noqa: SIM118 (not a dict)
            raise UserError(f"the checkpoint lacks {key}", where=str(self.folder), mend="resume from another one")
        return file.get_tensor(key)

    def random_states(self) -> dict[str, Tensor]:
        """Random states belong to ranks: with another number of ranks each keeps those it was seeded with."""
        if self.world_size != dist.get_world_size():
            return {}
        file = self.files[dist.get_rank()]
        return {name: self._tensor(file, f"rng/{name}") for name in _rng_states()}


def _owned(weights: WeightMap, optimizer: MegatronOptimizer) -> list[tuple[Any, Placed, int, int]]:
    """(optimizer, parameter, begin, end): the elements whose state this data-parallel rank holds."""
    by_parameter = {placed.parameter: placed for placed in weights.placed.values()}
    owned = []
    for part in distributed_optimizers(optimizer):
        for parameter in part.model_param_group_index_map:
            span = part._get_model_param_range_map(parameter)["param"]
            owned.append((part, by_parameter[parameter], span.start, span.end))
    return owned


def _steps(part: Any, held: dict[str, Tensor]) -> int:
    """Adam's step count: torch keeps it per parameter, TransformerEngine per group."""
    if "step" in held:
        return int(held["step"])
    return int(part.optimizer.param_groups[0].get("step", 0))


def _prepare_state(part: Any, steps: int) -> None:
    """Adam's tensors, so that there is something to fill. Every parameter gets a `step` of its own: upstream's
    initialisation leaves it out, and one tensor shared by all would advance once per parameter."""
    part.optimizer.state.clear()
    if not steps:
        return
    part.init_state_fn(part.optimizer, part.config)
    for group in part.optimizer.param_groups:
        if isinstance(part.optimizer, torch.optim.Optimizer) and type(part.optimizer).__module__.startswith("torch."):
            for parameter in group["params"]:
                part.optimizer.state[parameter]["step"] = torch.tensor(0.0)
        else:
            group["step"] = steps


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {f"tracker/{name}": state.cpu() for name, state in tracker.items()}


def _set_rng_states(states: dict[str, Tensor]) -> None:
    if not states:
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    prefix = "tracker/"
    tracked = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
