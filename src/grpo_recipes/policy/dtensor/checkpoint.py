"""The trainer's state on disk, written and read by torch.distributed.checkpoint (DCP): float32 weights, both moments of
Adam, the number of steps and random states.

Every rank writes its own parts into one file and gathers nothing; of ranks that hold the same elements one writes them.
DCP puts the parts together again under other data, context and tensor parallel sizes. Its index is a pickle: only what
an index is made of is unpickled, nothing else that a file may name.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from grpo_recipes.errors import UserError
from grpo_recipes.policy.dtensor.mesh import Mesh
from grpo_recipes.policy.dtensor.names import experts_of, pieces
from grpo_recipes.policy.dtensor.optimizer import Optimizer
from grpo_recipes.policy.dtensor.weights import Weights, local_part
from grpo_recipes.runs.files import file_sha256

TRAINER = "trainer.json"
INDEX = ".metadata"
FORMAT = 1


class Checkpoints:
    """Saves the trainer's state, in the foreground or in a thread, and reads it back."""

    def __init__(self, weights: Weights, optimizer: Optimizer, mesh: Mesh) -> None:
        self._weights, self._optimizer, self._mesh = weights, optimizer, mesh
        self._writing: tuple[Future[Any], Path] | None = None

    def save(self, folder: Path) -> dict[str, str]:
        """Collective. `folder` exists and is empty; the sha256 of each file that this rank wrote, by name.

        Raises OSError where the disk is full or refuses.
        """
        self.finish(wait=True)
        self._write_trainer(folder)
        with _plain_errors():
            dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(folder), process_group=self._mesh.control)
        return self._digests(folder)

    def start(self, folder: Path) -> None:
        """As `save`, but returns once the state is copied to host memory. Waits for the save before."""
        self.finish(wait=True)
        self._write_trainer(folder)
        with _plain_errors():
            future = dcp.async_save(
                self._state(), storage_writer=dcp.FileSystemWriter(folder), process_group=self._mesh.control
            )
        self._writing = cast("Future[Any]", future), folder

    def finish(self, *, wait: bool) -> dict[str, str] | None:
        """What `save` returns, once all that `start` began is on disk; None while it is not, or where nothing was begun.
        Raises what writing raised."""
        if self._writing is None or not (wait or self._writing[0].done()):
            return None
        future, folder = self._writing
        with _plain_errors():
            future.result()
        return self._digests(folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Collective. Raises UserError for a file or tensor that is missing or damaged, and for a checkpoint of another
        model, before anything is changed."""
        saved = _read_trainer(folder)
        reader = _Reader(folder)
        index = reader.read_metadata()
        if saved["weights"] != self._plan():
            different = next(
                (name for name, shape in self._plan().items() if saved["weights"].get(name) != shape),
                f"a model with {len(saved['weights'])} tensors",
            )
            raise UserError(
                f"a checkpoint of another model: {different}",
                where=str(folder),
                mend="resume with the model that the checkpoint was written from",
            )
        state = self._state(moments=saved["steps"] > 0, random=False)
        random = {key: torch.empty_like(value) for key, value in self._random_states(saved, folder).items()}
        for key, tensor in {**state, **random}.items():
            found = index.state_dict_metadata.get(key)
            if not isinstance(found, TensorStorageMetadata) or found.size != tensor.size():
                raise UserError(f"{key} is missing", where=str(folder / INDEX), mend="choose another checkpoint")
        _load({**state, **random}, reader, folder, process_group=self._mesh.control)
        self._optimizer.restore(saved["steps"])
        _set_random_states({key.rpartition("/")[2]: value for key, value in random.items()})

    # -- what is in it ------------------------------------------------------------------------------------------
    def _state(self, *, moments: bool | None = None, random: bool = True) -> dict[str, Tensor]:
        """Live tensors by key."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._weights.parameters.items():
            state[f"weights/{name}"] = _laid_out_like(parameter, local_part(parameter))
        if self._optimizer.steps > 0 if moments is None else moments:
            for name, found in self._optimizer.moments().items():
                for moment, local in found.items():
                    state[f"{moment}/{name}"] = _laid_out_like(self._weights.parameters[name], local)
        if random:
            rank = dist.get_rank()
            state |= {f"random/{rank}/{kind}": value for kind, value in _random_states().items()}
        return state

    def _plan(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for name, parameter in self._weights.parameters.items()}

    def _write_trainer(self, folder: Path) -> None:
        if dist.get_rank():
            return
        found = {
            "format": FORMAT,
            "world_size": dist.get_world_size(),
            "device": self._mesh.device.type,
            "steps": self._optimizer.steps,
            "dtype": str(self._weights.dtype).removeprefix("torch."),
            "weights": self._plan(),
        }
        (folder / TRAINER).write_text(json.dumps(found, indent=1))

    def _random_states(self, saved: dict[str, Any], folder: Path) -> dict[str, Tensor]:
        """Random states belong to ranks: with another number of ranks each keeps those it was seeded with."""
        if saved["world_size"] != dist.get_world_size():
            return {}
        here = self._mesh.device.type
        if saved["device"] != here:
            raise UserError(
                f"the checkpoint was written on {saved['device']}, and this is {here}: its random states mean nothing",
                where=str(folder),
                mend=f"resume on {saved['device']}, or export the weights and start a run from them",
            )
        return {f"random/{dist.get_rank()}/{kind}": value for kind, value in _random_states().items()}

    def _digests(self, folder: Path) -> dict[str, str]:
        rank = dist.get_rank()
        mine = sorted(folder.glob(f"__{rank}_*.distcp"))
        if rank == 0:
            mine += [folder / INDEX, folder / TRAINER]
        return {path.name: file_sha256(path) for path in mine}


class SavedWeights:
    """The weights of a checkpoint, read without a trainer and without processes.

    Args:
        config: the model's config.json.

    Raises UserError for a file that is missing or damaged.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, saved = folder, _read_trainer(folder)
        self._shapes: dict[str, list[int]] = saved["weights"]
        self.dtype: torch.dtype = getattr(torch, saved["dtype"])
        self._model_type, self._experts = config["model_type"], experts_of(config)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and whole tensor, one parameter at a time, as the trainer exports them."""
        for name, shape in self._shapes.items():
            whole = torch.empty(shape)
            _load({f"weights/{name}": whole}, _Reader(self._folder), self._folder, no_dist=True)
            for piece in pieces(self._model_type, name, self._experts):
                yield piece.name, piece.of(whole.to(self.dtype))


def _load(state: dict[str, Tensor], reader: _Reader, folder: Path, **how: Any) -> None:
    try:
        dcp.load(state, storage_reader=reader, **how)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise UserError(f"damaged: {first}", where=str(folder), mend="choose another checkpoint") from error


def _laid_out_like(parameter: Tensor, local: Tensor) -> DTensor:
    """Shares memory with `local`, also where weights lie in host memory: DTensor.from_local would copy it to a GPU."""
    assert isinstance(parameter, DTensor)
    return DTensor(local, parameter._spec, requires_grad=False)


def _read_trainer(folder: Path) -> dict[str, Any]:
    path = folder / TRAINER
    try:
        saved = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"no {TRAINER} here: not a checkpoint of the DTensor trainer",
            where=str(folder),
            mend="resume with the trainer that wrote it, or export its weights and start a run from them",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"damaged: {error}", where=str(path), mend="choose another checkpoint") from None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise UserError("is of another version", where=str(path), mend="resume with the version that wrote it")
    return saved


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                index = _Unpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
            raise UserError(f"missing or damaged: {error}", where=str(path), mend="choose another checkpoint") from None
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return cast(Metadata, index)


class _Unpickler(pickle.Unpickler):
    """Of the classes that an index of DCP is made of."""

    def find_class(self, module: str, name: str) -> Any:
        plain = (("torch", "Size"), ("torch.serialization", "_get_layout"))
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        allowed = module.startswith("torch.distributed.checkpoint.") or module in ("pathlib", "pathlib._local")
        if not (allowed or dtype or (module, name) in plain):
            raise pickle.UnpicklingError(f"names {module}.{name}, which does not belong there")
        return super().find_class(module, name)


class _plain_errors:
    """What DCP wraps, as it was raised on the first rank that failed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, CheckpointException):
            raise next(iter(error.failures.values()))[0] from error


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_states(states: dict[str, Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
