"""What can be said of a model's folder without torch, before any process starts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.architecture import check_architecture
from grpo_recipes.recipe.dtensor import model_problems
from grpo_recipes.recipe.layout import layout_problems
from grpo_recipes.recipe.locate import recipes_folder
from grpo_recipes.recipe.model_flops import model_shape
from grpo_recipes.recipe.problems import nearest, raise_problems
from grpo_recipes.recipe.safetensors_header import TensorEntry, read_header
from grpo_recipes.recipe.schema import PolicyConfig

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class ModelFacts:
    """A model folder that passed every check."""

    folder: Path
    tokenizer_folder: Path
    vocab_size: int  # rows of the embedding
    max_positions: int  # tokens
    stop_token_ids: tuple[int, ...]


def model_path(name: str, revision: str | None = None, key: str = "policy.model_name") -> Path:
    """The local folder that policy.model_name or policy.tokenizer.name stands for. Never asks the network.

    `recipe:<recipe>/<folder>` lies beside a recipe; anything else is a folder, or a hub name that is in the local
    Hugging Face cache.

    Raises:
        UserError: there is no such folder and no such cached model.
    """
    if name.startswith("recipe:"):
        return _beside_recipe(name.removeprefix("recipe:"), key)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{name} is a file", where=key, mend="give the folder that holds config.json")
    if _HUB_NAME.fullmatch(name):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent
        raise UserError(
            f"{name} is neither a folder here ({Path.cwd()}) nor a model in the Hugging Face cache",
            where=key,
            mend=f"fetch it with `hf download {name}`, or set {key} to a local folder",
        )
    raise UserError(f"no folder {name}", where=key, mend="give an existing model folder")


def _beside_recipe(path: str, key: str) -> Path:
    folder = recipes_folder() / path
    if folder.is_dir():
        return folder
    beside = [
        f"recipe:{config.parent.relative_to(recipes_folder()).as_posix()}"
        for config in sorted(recipes_folder().glob("*/*/config.json"))
    ]
    close = nearest(f"recipe:{path}", beside) or beside
    mend = f"did you mean {' or '.join(close)}?" if close else "give a folder"
    raise UserError(f"no folder {path} among the recipes", where=key, mend=mend)


def check_model(policy: PolicyConfig) -> ModelFacts:
    """Everything a run will need of the model's and the tokenizer's folder.

    Raises:
        UserError: missing, damaged or unsupported; wants its own code run; weights only as pickles; fewer positions
            than the recipe's sequences; tokenizer and embedding disagree; no stop token.
    """
    folder = model_path(policy.model_name, policy.model_revision)
    tokenizer_folder = (
        model_path(policy.tokenizer.name, key="policy.tokenizer.name") if policy.tokenizer.name else folder
    )
    config = _config(folder)
    _refuse_own_code(folder, config, policy.trust_remote_code)
    shape = model_shape(config)
    own = policy.dtensor_cfg
    layout = model_problems(own, shape) if own.enabled else layout_problems(policy.megatron_cfg, shape)
    raise_problems(list(layout), "the parallel layout of this model")
    if policy.initial_weights == "pretrained":
        _check_weights(folder, config)
    positions = _number(config, "max_position_embeddings", folder)
    if policy.max_total_sequence_length > positions:
        raise UserError(
            f"{policy.max_total_sequence_length} tokens are more than the model's {positions} positions "
            f"(max_position_embeddings in {folder / 'config.json'})",
            where="policy.max_total_sequence_length",
            mend=f"set it to at most {positions}",
        )
    vocab_size = _number(config, "vocab_size", folder)
    ids = _token_ids(tokenizer_folder)
    if policy.tokenizer.name:
        _refuse_own_code(tokenizer_folder, {}, policy.trust_remote_code)
    if max(ids.values()) >= vocab_size:
        raise UserError(
            f"its largest token id {max(ids.values())} lies outside the embedding of {vocab_size} rows "
            f"(vocab_size in {folder / 'config.json'})",
            where=str(tokenizer_folder / "tokenizer.json"),
            mend="give the tokenizer that belongs to the model",
        )
    stop = stop_token_ids(folder, tokenizer_folder, policy.generation.stop_token_ids)
    outside = [token for token in stop if token >= vocab_size]
    if outside:
        raise UserError(
            f"{outside[0]} is not a token: the vocabulary has {vocab_size}",
            where="policy.generation.stop_token_ids",
            mend="correct it, or leave it out for the tokenizer's end of sequence",
        )
    return ModelFacts(folder, tokenizer_folder, vocab_size, positions, stop)


def stop_token_ids(folder: Path, tokenizer_folder: Path, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """The tokens that end a response: those of the recipe, else the tokenizer's end of sequence, else
    eos_token_id of generation_config.json, else of config.json.

    Raises:
        UserError: none of them says.
    """
    if given:
        return given
    token = read_json(tokenizer_folder / "tokenizer_config.json", optional=True).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None:
        ids = _token_ids(tokenizer_folder)
        if token not in ids:
            raise UserError(
                f"the end-of-sequence token {token!r} is not in the vocabulary",
                where=str(tokenizer_folder / "tokenizer_config.json"),
                mend="correct the tokenizer, or set policy.generation.stop_token_ids",
            )
        return (ids[token],)
    for file in ("generation_config.json", "config.json"):
        eos = read_json(folder / file, optional=True).get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    raise UserError(
        f"neither {tokenizer_folder} nor {folder} names an end-of-sequence token",
        where="policy.generation.stop_token_ids",
        mend="set it to the ids that end a response, for example [2]",
    )


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    check_architecture(config, str(folder / "config.json"))
    return config


def _refuse_own_code(folder: Path, config: dict[str, Any], trusted: bool) -> None:
    for name, data in (
        ("config.json", config),
        ("tokenizer_config.json", read_json(folder / "tokenizer_config.json", optional=True)),
    ):
        if "auto_map" in data and not trusted:
            raise UserError(
                "the folder wants its own Python code run (auto_map)",
                where=str(folder / name),
                mend="read that code; if you trust it, set policy.trust_remote_code=true",
            )


def _check_weights(folder: Path, config: dict[str, Any]) -> None:
    if config.get("quantization_config"):
        raise UserError(
            "the weights are quantised",
            where=f"{folder / 'config.json'}: quantization_config",
            mend="take the model's bfloat16 weights",
        )
    tensors: dict[str, TensorEntry] = {}
    for file, expected in _weight_files(folder).items():
        if not file.is_file():
            raise UserError(f"names {file.name}, which is missing", where=str(folder / _INDEX), mend="fetch it")
        header = read_header(file)
        lost = sorted(expected - header.keys())
        if lost:
            raise UserError(f"lacks {lost[0]}, which {_INDEX} places here", where=str(file), mend="fetch both again")
        tensors |= header
    embedding = tensors.get("model.embed_tokens.weight")
    shape = (_number(config, "vocab_size", folder), _number(config, "hidden_size", folder))
    if embedding is None or embedding.shape != shape:
        found = "missing" if embedding is None else " x ".join(map(str, embedding.shape))
        raise UserError(
            f"the embedding model.embed_tokens.weight is {found}, config.json says {shape[0]} x {shape[1]}",
            where=str(folder),
            mend="give weights and config.json of the same model",
        )


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """Each safetensors file with the tensors that the index, if there is one, places in it."""
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError("has no weight_map", where=str(folder / _INDEX), mend="fetch it again")
        files: dict[Path, set[str]] = {}
        for tensor, file in weight_map.items():
            files.setdefault(folder / file, set()).add(tensor)
        return files
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return {file: set() for file in found}
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"the weights are pickles ({pickles[0]}), which can run code when they are read",
            where=str(folder),
            mend="convert them to safetensors (save_pretrained of transformers writes it)",
        )
    raise UserError(
        "holds no weights (*.safetensors)", where=str(folder), mend="add them, or set policy.initial_weights=random"
    )


def _token_ids(folder: Path) -> dict[str, int]:
    """Every token of tokenizer.json with its id."""
    path = folder / "tokenizer.json"
    data = read_json(path)
    try:
        vocab = data["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [token, score] in the order of the ids
            vocab = {entry[0]: index for index, entry in enumerate(vocab)}
        ids = {**vocab, **{added["content"]: added["id"] for added in data.get("added_tokens", [])}}
    except (KeyError, TypeError, IndexError):
        raise UserError("is not a tokenizers file", where=str(path), mend="save it again with transformers") from None
    if not ids:
        raise UserError("has an empty vocabulary", where=str(path), mend="give a trained tokenizer")
    return ids


def _number(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise UserError(
            f"{key} should be a positive integer, is {value!r}", where=str(folder / "config.json"), mend="correct it"
        )
    return value


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """A JSON object of a model's folder; an empty one where an optional file is missing.

    Raises:
        UserError: it is missing, or not a JSON object.
    """
    if not path.is_file():
        if optional:
            return {}
        raise UserError(f"no {path.name} here", where=str(path.parent), mend="give the folder of a Hugging Face model")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"is not JSON: {error}", where=str(path), mend="fetch or write it again") from None
    if not isinstance(data, dict):
        raise UserError("is not a JSON object", where=str(path), mend="fetch or write it again")
    return data
