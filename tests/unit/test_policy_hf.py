import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from grpo_recipes.errors import UserError
from grpo_recipes.policy.attention import rotate
from grpo_recipes.policy.hf.families import family_of
from grpo_recipes.policy.hf.folder import FolderWriter, RandomTensors, SafetensorsFolder, read_config, write_companions
from grpo_recipes.policy.hf.gguf import find_gguf
from grpo_recipes.policy.hf.mapping import Heads, merge, shard, split, unshard
from grpo_recipes.policy.hf.rope import rotary_of
from policy_models import LLAMA3_ROPE, VOCAB, write_llama

HEADS = Heads(query=6, groups=2, width=4)


def test_queries_keys_and_values_interleave_by_group():
    q, k, v = torch.arange(24.0)[:, None], torch.arange(100.0, 108)[:, None], torch.arange(200.0, 208)[:, None]
    whole = merge("qkv", (q, k, v), HEADS, 40)
    first_group = [*range(12), *range(100, 104), *range(200, 204)]
    assert whole[:20, 0].tolist() == [float(x) for x in first_group]
    for back, original in zip(split("qkv", whole, HEADS, 0), (q, k, v), strict=True):
        assert torch.equal(back, original)
    # Cut in two, each rank has one whole group.
    assert torch.equal(shard("qkv", whole, 0, 0, 2), whole[:20])


def test_gate_and_up_are_cut_side_by_side():
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14)[:, None]
    whole = merge("gate_up", (gate, up), HEADS, 8)
    parts = [shard("gate_up", whole, 0, rank, 2) for rank in (0, 1)]
    assert parts[1][:, 0].tolist() == [2.0, 3.0, 12.0, 13.0]
    assert torch.equal(unshard("gate_up", parts, 0), whole)


def test_vocabulary_is_padded_and_unpadded():
    table = torch.randn(5, 3)
    padded = merge("vocab", (table,), HEADS, 8)
    assert padded.shape == (8, 3)
    assert not padded[5:].any()
    assert torch.equal(split("vocab", padded, HEADS, 5)[0], table)


@pytest.mark.parametrize("kind", ["qkv", "gate_up", "copy", "vocab"])
@pytest.mark.parametrize("dim", [0, 1])
def test_cutting_and_joining_are_inverse(kind, dim):
    whole = torch.randn(40, 6)
    parts = [shard(kind, whole, dim, rank, 2) for rank in (0, 1)]
    assert torch.equal(unshard(kind, parts, dim), whole)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        LLAMA3_ROPE,
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda r: r["rope_type"],
)
def test_rotation_equals_transformers(rope):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    hf = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=32, max_position_embeddings=128, rope_parameters=rope
    )
    positions = torch.arange(100)
    query = torch.randn(100, 4, 32)
    cos, sin = LlamaRotaryEmbedding(hf)(query, positions[None])
    wanted = apply_rotary_pos_emb(query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos, sin)[0][0]
    found = rotate(query, *rotary_of(hf).at(positions, torch.float32))
    torch.testing.assert_close(found, wanted.transpose(0, 1), atol=1e-6, rtol=0)


def test_older_files_name_rope_theta_and_rope_scaling(tmp_path):
    write_llama(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    old = {"rope_theta": LLAMA3_ROPE["rope_theta"], "rope_scaling": {**LLAMA3_ROPE, "rope_theta": None}}
    del old["rope_scaling"]["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(raw | old))
    found = rotary_of(read_config(tmp_path)).inverse_frequencies
    wanted = rotary_of(LlamaConfig(head_dim=16, rope_parameters=LLAMA3_ROPE, max_position_embeddings=128))
    assert torch.equal(found, wanted.inverse_frequencies)


def test_rope_that_depends_on_the_input_is_refused():
    hf = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UserError, match="dynamic"):
        rotary_of(hf)


def test_unknown_family_is_refused():
    from transformers import GPT2Config

    with pytest.raises(UserError, match="supported: llama"):
        family_of(GPT2Config())


def test_missing_and_broken_folders(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_config(tmp_path)
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        SafetensorsFolder(tmp_path)


def test_a_folder_that_wants_its_own_code_run_is_refused(tmp_path):
    write_llama(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(UserError, match="trust_remote_code"):
        read_config(tmp_path)
    assert read_config(tmp_path, trust_remote_code=True).vocab_size == VOCAB


def test_pickled_weights_are_not_opened(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="convert the weights to safetensors"):
        SafetensorsFolder(tmp_path)


def test_truncated_and_misshapen_tensors(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    with pytest.raises(UserError, match=r"a is 2x3, config\.json asks for 3x2"):
        source.get("a", (3, 2))
    with pytest.raises(UserError, match="b is missing"):
        source.get("b", (1,))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(UserError, match="damaged"):
        SafetensorsFolder(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    FolderWriter(tmp_path, shard_bytes=20).write([("a", torch.zeros(4)), ("b", torch.ones(4))])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00002"):
        SafetensorsFolder(tmp_path)


def test_written_shards_are_read_by_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    model = write_llama(tmp_path / "a")
    (tmp_path / "b").mkdir()
    FolderWriter(tmp_path / "b", shard_bytes=10000).write(model.state_dict().items())
    write_companions(tmp_path / "a", tmp_path / "b", torch.float32)
    assert len(list((tmp_path / "b").glob("model-*-of-*.safetensors"))) > 3
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_random_weights_depend_on_seed_and_name_only():
    source = RandomTensors(0.02, seed=5)
    first = source.get("model.layers.0.mlp.up_proj.weight", (300, 40))
    source.get("something else", (7, 7))
    assert torch.equal(first, RandomTensors(0.02, seed=5).get("model.layers.0.mlp.up_proj.weight", (300, 40)))
    assert not torch.equal(first, RandomTensors(0.02, seed=6).get("model.layers.0.mlp.up_proj.weight", (300, 40)))
    assert float(first.std()) == pytest.approx(0.02, rel=0.05)
    assert source.get("model.norm.weight", (4,)).tolist() == [1.0] * 4


def test_a_gguf_source_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="smollm2"):
        find_gguf(tmp_path / "nothing.gguf")
