"""A model's folder is judged without torch, before any process starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.model_folder import ModelFacts, check_model, model_path, stop_token_ids
from grpo_recipes.recipe.safetensors_header import read_header
from grpo_recipes.recipe.schema import PolicyConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 6,
    "hidden_size": 4,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
TOKENIZER = {
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}},
    "added_tokens": [{"id": 3, "content": "<end>"}],
}


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, data = {}, b""
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + size]}
        data += bytes(size)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "tokenizer.json", TOKENIZER)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>"})
    write_safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": (6, 4), "model.norm.weight": (4,)})
    return folder


def policy(folder: Path | str, **changes: Any) -> PolicyConfig:
    generation = {"max_new_tokens": 8, **changes.pop("generation", {})}
    values = {"train_global_batch_size": 1, "max_total_sequence_length": 64, "generation": generation, **changes}
    return PolicyConfig.model_validate({"model_name": str(folder), **values})


def change(path: Path, **values: Any) -> None:
    data = json.loads(path.read_text())
    data.update(values)
    write_json(path, {key: value for key, value in data.items() if value is not None})


def error_of(folder: Path | str, **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        check_model(policy(folder, **changes))
    assert "\n  -> " in str(error.value)
    return str(error.value)


def test_a_good_folder(folder: Path) -> None:
    assert check_model(policy(folder)) == ModelFacts(folder, folder, 6, 64, (3,))


def test_random_weights_need_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert check_model(policy(folder, initial_weights="random")).vocab_size == 6
    assert "holds no weights" in error_of(folder)


def test_a_sharded_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"lm_head.weight": (6, 4)})
    index = {
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    write_json(folder / "model.safetensors.index.json", {"weight_map": index})
    check_model(policy(folder))
    write_json(
        folder / "model.safetensors.index.json", {"weight_map": {**index, "x": "model-00002-of-00002.safetensors"}}
    )
    assert "model-00002-of-00002.safetensors: lacks x" in error_of(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "names model-00002-of-00002.safetensors, which is missing" in error_of(folder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere", "policy.model_name: no folder nowhere"),
        ("/no/where/at/all", "no folder /no/where/at/all"),
        ("no-such-org/no-such-model", "neither a folder here"),
        ("recipe:tiny_arith/modle", "no folder tiny_arith/modle among the recipes"),
    ],
)
def test_missing_folders(name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in error_of(name)


def test_a_missing_tokenizer_folder_is_told_by_its_key(tmp_path: Path, folder: Path) -> None:
    assert error_of(folder, tokenizer={"name": "/no/where"}).startswith("policy.tokenizer.name: no folder /no/where")


def test_a_hub_name_is_looked_up_in_the_local_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.file_download

    revision = "0" * 40
    snapshot = tmp_path / "models--org--name" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    write_json(snapshot / "config.json", CONFIG)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text(revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_path("org/name") == snapshot
    assert model_path("org/name", revision) == snapshot
    with pytest.raises(UserError, match="hf download org/name"):
        model_path("org/name", "1" * 40)


@pytest.mark.parametrize(
    ("file", "changes", "expected"),
    [
        (
            "config.json",
            {"model_type": "gpt2"},
            "models of type 'gpt2' (LlamaForCausalLM) are not supported\n  -> supported: llama",
        ),
        ("config.json", {"architectures": ["X"]}, "models of type 'llama' (X) are not supported"),
        ("config.json", {"max_position_embeddings": 63}, "64 tokens are more than the model's 63 positions"),
        ("config.json", {"vocab_size": None}, "config.json: vocab_size: should be a positive integer, is None"),
        ("config.json", {"vocab_size": 7}, "the embedding model.embed_tokens.weight is 6 x 4, config.json says 7 x 4"),
        ("config.json", {"auto_map": {"AutoModel": "x.Y"}}, "config.json: the folder wants its own Python code run"),
        ("tokenizer_config.json", {"auto_map": {}}, "tokenizer_config.json: the folder wants its own Python code run"),
        ("tokenizer_config.json", {"eos_token": "</s>"}, "the end-of-sequence token '</s>' is not in the vocabulary"),
        (
            "tokenizer.json",
            {"added_tokens": [{"id": 6, "content": "<end>"}]},
            "largest token id 6 lies outside the embedding of 6 rows",
        ),
        ("tokenizer.json", {"model": {}}, "is not a tokenizers file"),
        ("tokenizer.json", {"model": {"vocab": {}}, "added_tokens": []}, "has an empty vocabulary"),
    ],
)
def test_contradictions(folder: Path, file: str, changes: dict[str, Any], expected: str) -> None:
    change(folder / file, **changes)
    assert expected in error_of(folder)


def test_own_code_can_be_trusted_by_name(folder: Path) -> None:
    change(folder / "config.json", auto_map={"AutoModel": "x.Y"})
    check_model(policy(folder, trust_remote_code=True))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_damaged_and_missing_json(folder: Path, file: str) -> None:
    (folder / file).write_text("{")
    assert f"{file}: is not JSON" in error_of(folder)
    (folder / file).write_text("[]")
    assert f"{file}: is not a JSON object" in error_of(folder)
    (folder / file).unlink()
    assert f"no {file} here" in error_of(folder)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "the weights are pickles (pytorch_model.bin)" in error_of(folder)
    assert "convert them to safetensors" in error_of(folder)


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_truncated_weights(folder: Path, cut: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    assert "model.safetensors: is damaged or truncated" in error_of(folder)


def test_other_damage_to_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"x")
    assert "is damaged or truncated" in error_of(folder)
    file.write_bytes(whole[:8] + b"\xff" * 20 + whole[28:])
    assert "its safetensors header cannot be read" in error_of(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert "is a Git LFS pointer" in error_of(folder)


def test_the_header_equals_what_safetensors_reads(tmp_path: Path) -> None:
    """Against the library that writes real files."""
    import torch
    from safetensors.torch import save_file

    file = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(5)}, file, metadata={"format": "pt"})
    header = read_header(file)
    assert {name: (entry.dtype, entry.shape) for name, entry in header.items()} == {
        "a": ("BF16", (2, 3)),
        "b": ("F32", (5,)),
    }


def test_stop_tokens(folder: Path) -> None:
    assert stop_token_ids(folder, folder, (1, 0)) == (1, 0)
    assert stop_token_ids(folder, folder, None) == (3,)
    write_json(folder / "tokenizer_config.json", {"eos_token": {"content": "c"}})
    assert stop_token_ids(folder, folder, None) == (2,)
    write_json(folder / "tokenizer_config.json", {})
    assert stop_token_ids(folder, folder, None) == (2,)
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 3]})
    assert stop_token_ids(folder, folder, None) == (1, 3)
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=None)
    assert "names an end-of-sequence token" in error_of(folder)
    assert "6 is not a token: the vocabulary has 6" in error_of(folder, generation={"stop_token_ids": [6]})


def test_a_tokenizer_of_its_own(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    write_json(other / "tokenizer.json", {"model": {"type": "Unigram", "vocab": [[str(i), 0.0] for i in range(7)]}})
    assert "outside the embedding" in error_of(folder, tokenizer={"name": str(other)})
    write_json(other / "tokenizer.json", {"model": {"type": "Unigram", "vocab": [[str(i), 0.0] for i in range(5)]}})
    write_json(other / "tokenizer_config.json", {"eos_token": "4"})
    assert check_model(policy(folder, tokenizer={"name": str(other)})) == ModelFacts(folder, other, 6, 64, (4,))
