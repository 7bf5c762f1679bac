"""A Hugging Face model folder: configuration in, tensors in and out. Weights are safetensors; no pickle is opened."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.model_folder import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHARD_BYTES = 5 * 2**30
# As safetensors' headers name them.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BUFFERS = "rotary_emb.inv_freq"  # older checkpoints hold it; nothing reads it
# What belongs to the tokenizer and to generation, copied unchanged beside exported weights.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "generation_config.json",
    "LICENSE*",
)


class TensorSource(Protocol):
    """Where initial weights come from."""

    names: frozenset[str] | None  # None: any name

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that Hugging Face name; raises UserError where it is missing or has another shape."""


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Raises UserError for a missing or broken folder, and for one that wants its own code run."""
    from transformers import AutoConfig

    raw = read_json(folder / "config.json")
    if "auto_map" in raw and not trust_remote_code:
        raise UserError(
            "the model wants code of its own folder to run",
            where=str(folder / "config.json"),
            mend="set policy.trust_remote_code=true if you trust it",
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"transformers cannot read it: {error}", where=str(folder / "config.json")) from error


class SafetensorsFolder:
    """Tensors of one model, read one at a time."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        files = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            wanted = set(json.loads(index.read_text())["weight_map"].values())
            missing = sorted(wanted - {f.name for f in files})
            if missing:
                raise UserError(f"files named in the index are missing: {', '.join(missing)}", where=str(index))
            files = [folder / name for name in sorted(wanted)]
        if not files:
            raise UserError("no *.safetensors here", where=str(folder), mend="convert the weights to safetensors")
        self._where: dict[str, Any] = {}
        for path in files:
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"damaged or truncated: {error}", where=str(path)) from error
            self._where.update(dict.fromkeys(handle.keys(), handle))
        self._folder = folder
        self.names: frozenset[str] | None = frozenset(self._where)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._where:
            raise UserError(f"tensor {name} is missing", where=str(self._folder))
        tensor = self.read(name)
        if tuple(tensor.shape) != shape:
            found = "x".join(map(str, tensor.shape))
            raise UserError(
                f"tensor {name} is {found}, config.json asks for {'x'.join(map(str, shape))}", where=str(self._folder)
            )
        return tensor

    def read(self, name: str) -> Tensor:
        return self._where[name].get_tensor(name)

    def dtype(self, name: str) -> torch.dtype:
        """Read from the header alone."""
        return DTYPES[self._where[name].get_slice(name).get_dtype()]


class RandomTensors:
    """Normal weights of the standard deviation in config.json, ones for norms. The draw of a tensor depends on seed
    and name only, so every parallel layout starts from the same model."""

    names = None

    def __init__(self, standard_deviation: float, seed: int) -> None:
        self.standard_deviation, self.seed = standard_deviation, seed

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(shape, generator=generator) * self.standard_deviation


def write_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Raises OSError where the disk is full or refuses: safetensors passes that on as an error of its own."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error), str(path)) from error


class FolderWriter:
    """Collects tensors into safetensors files of at most `shard_bytes`, with an index where there are several."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self._shards: list[list[str]] = []
        self._held: dict[str, Tensor] = {}
        self._held_bytes = self.total_bytes = 0

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if self._held and self._held_bytes + size > self.shard_bytes:
                self._flush()
            self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
            self._held_bytes += size
            self.total_bytes += size
        self._flush()
        self._name_shards()

    def _flush(self) -> None:
        write_safetensors(self._held, self._part(len(self._shards)), {"format": "pt"})
        self._shards.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f".part-{number}.safetensors"

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self.folder / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def export_model(
    target: Path, source: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, trained_from_source: bool
) -> None:
    """Write trained tensors with the configuration and tokenizer of the model they belong to.

    Args:
        target: an existing empty folder.
        source: the folder that the run was given as its model.
        tensors: Hugging Face names and whole tensors.
        dtype: of the tensors.
        trained_from_source: the weights of `source` are where training began (not random ones). Names, shapes and
            dtypes are then those of `source`, tensor by tensor, whatever dtype the trainer worked in.
    """
    if trained_from_source:
        published = SafetensorsFolder(source)
        FolderWriter(target).write(_as_published(tensors, published, read_json(source / "config.json")))
        write_companions(source, target)
    else:
        FolderWriter(target).write(tensors)
        write_companions(source, target, dtype)


def _as_published(
    tensors: Iterable[tuple[str, Tensor]], published: SafetensorsFolder, config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    names = published.names or frozenset()
    for name, tensor in tensors:
        yield name, tensor.to(published.dtype(name))
        if name == "model.embed_tokens.weight" and config.get("tie_word_embeddings") and "lm_head.weight" in names:
            yield "lm_head.weight", tensor.to(published.dtype("lm_head.weight"))
    for name in sorted(n for n in names if n.endswith(BUFFERS)):
        yield name, published.read(name)


def write_companions(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """config.json, with another dtype if one is given; tokenizer and generation files unchanged."""
    config = read_json(source / "config.json")
    config.pop("quantization_config", None)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in companions(source):
        shutil.copyfile(path, target / path.name)


def companions(folder: Path) -> Iterator[Path]:
    for pattern in COMPANIONS:
        yield from sorted(p for p in folder.glob(pattern) if p.is_file())
