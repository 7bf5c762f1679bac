"""Every family against transformers: logprobs, gradients, and weights in and out."""

import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_recipes.errors import UserError
from grpo_recipes.policy.contract import empty_batch
from grpo_recipes.policy.hf.folder import SafetensorsFolder
from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from grpo_recipes.policy.megatron.weights import whole_model_name
from policy_models import (
    LLAMA3_ROPE,
    gradients,
    policy_config,
    policy_gradient_loss,
    random_batch,
    reference_gradients,
    reference_outputs,
    write_model,
)
from published_names import published

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama 3, tied": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama, DeepSeek's distillation": ("llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, DeepSeek's distillation": ("qwen2", {"tie_word_embeddings": False, "use_sliding_window": False}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, probabilities not normalised": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3_moe, one expert": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    "mixtral": ("mixtral", {}),
}


def make(folder: Path, **changes) -> MegatronPolicy:
    return MegatronPolicy(policy_config(folder, **changes), 0.7, 20, folder)


@pytest.mark.parametrize(("family", "config"), MODELS.values(), ids=MODELS)
def test_logprobs_and_gradients_equal_transformers(family, config, tmp_path):
    model = write_model(family, tmp_path, **config)
    policy = make(tmp_path)
    batch = random_batch(12)
    (found,) = policy.logprobs([batch])
    with torch.no_grad():
        single, _ = reference_outputs(model, batch, 0.7)
        wanted, _ = reference_outputs(model.double(), batch, 0.7)
    torch.testing.assert_close(found, single, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
    exact = reference_gradients(model, batch, 0.7)
    mine = gradients(policy, [batch])
    assert mine.keys() == exact.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(
            mine[name].double(), gradient, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_equal_bytes(found: Path, wanted: Path) -> None:
    mine, original = tensors_of(found), tensors_of(wanted)
    assert mine.keys() == original.keys()
    for name, tensor in original.items():
        assert (mine[name].dtype, mine[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(mine[name]) == bits(tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "config"), MODELS.values(), ids=MODELS)
def test_weights_come_out_as_they_went_in(family, config, dtype, tmp_path):
    """Names, shapes, dtypes and bytes, out of several shards."""
    write_model(family, tmp_path / "in", dtype=dtype, max_shard_size="20KB", **config)
    index = json.loads((tmp_path / "in" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    (tmp_path / "out").mkdir()
    policy = make(tmp_path / "in", precision=str(dtype).removeprefix("torch."))
    policy.export(tmp_path / "out")
    assert_equal_bytes(tmp_path / "out", tmp_path / "in")
    assert {spec.name for spec in policy.weight_plan()} == index.keys()
    raw = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("in", "out")]
    assert raw[0] == raw[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_transformers_reads_exported_experts(family, tmp_path):
    from transformers import AutoModelForCausalLM

    write_model(family, tmp_path / "in")
    policy = make(tmp_path / "in")
    batch = random_batch(5)
    policy.train([batch, empty_batch()], policy_gradient_loss)
    (tmp_path / "out").mkdir()
    policy.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        wanted, _ = reference_outputs(model, batch, 0.7)
    torch.testing.assert_close(policy.logprobs([batch])[0], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
def test_published_names_of_what_transformers_holds_in_memory(family, tmp_path):
    model = write_model(family, tmp_path)
    found, wanted = published(family, model.state_dict()), tensors_of(tmp_path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_an_export_keeps_what_its_source_holds_beside_the_weights(tmp_path):
    """A mixture of dtypes, the output layer of a tied model, and the buffers of older checkpoints."""
    write_model("llama", tmp_path / "in", tie_word_embeddings=True)
    tensors = tensors_of(tmp_path / "in")
    tensors = {n: t if "norm" in n else t.to(torch.bfloat16) for n, t in tensors.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "out").mkdir()
    make(tmp_path / "in").export(tmp_path / "out")  # trained in float32
    assert_equal_bytes(tmp_path / "out", tmp_path / "in")


class Watched:
    """A source that counts how many bytes of what it gave are alive at a time."""

    def __init__(self, folder: Path) -> None:
        self.source = SafetensorsFolder(folder)
        self.names, self.alive, self.peak, self.total = self.source.names, 0, 0, 0

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.source.get(name, shape)
        weakref.finalize(tensor, self.forget, tensor.nbytes)
        self.alive += tensor.nbytes
        self.total += tensor.nbytes
        self.peak = max(self.peak, self.alive)
        return tensor

    def forget(self, size: int) -> None:
        self.alive -= size


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_are_read_one_parameter_at_a_time(family, tmp_path):
    write_model(family, tmp_path, num_hidden_layers=6, max_shard_size="50KB")
    policy = make(tmp_path)
    source = Watched(tmp_path)
    policy.weights.load(source)
    assert source.total == sum(tensor.nbytes for tensor in tensors_of(tmp_path).values())
    # The next parameter is read before the last is let go; the largest is that of queries, keys and values.
    assert source.peak <= 2 * (4 + 2 + 2) * 16 * 48 * 4 < source.total / 3


def test_gathering_other_tensors_than_the_weights(tmp_path):
    write_model("qwen3_moe", tmp_path)
    weights = make(tmp_path).weights
    doubled = dict(weights.gather(of=lambda parameter: parameter.detach().double() * 2, dtype=torch.float64))
    for name, tensor in tensors_of(tmp_path).items():
        assert doubled[name].dtype == torch.float64
        assert torch.equal(doubled[name], tensor.double() * 2), name


def test_experts_saved_as_one_tensor_are_refused(tmp_path):
    model = write_model("qwen3_moe", tmp_path)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"experts\.0\.gate_proj\.weight is missing"):
        make(tmp_path)


def test_buckets_stay_small(tmp_path, monkeypatch):
    from grpo_recipes.policy.megatron import weights

    write_model("qwen3_moe", tmp_path)
    monkeypatch.setattr(weights, "BUCKET_BYTES", 30_000)
    sizes = [sum(t.nbytes for t in bucket.values()) for bucket in make(tmp_path).weight_buckets()]
    assert len(sizes) > 3
    assert max(sizes) <= 30_000


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("decoder.layers.1.mlp.router.weight", "decoder.layers.7.mlp.router.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
            "decoder.layers.6.mlp.experts.local_experts.19.linear_fc2.weight",
        ),
        (  # TransformerEngine's grouped GEMM
            "decoder.layers.0.mlp.experts.linear_fc1.weight12",
            "decoder.layers.6.mlp.experts.local_experts.28.linear_fc1.weight",
        ),
        (  # and its norms, held by the layers after them
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.6.input_layernorm.weight",
        ),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.6.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.bias", "decoder.layers.6.self_attention.linear_qkv.bias"),
    ],
)
def test_names_in_the_whole_model(name, wanted):
    """Of a stage that starts at the seventh layer, and a rank whose first expert is the seventeenth."""
    layers = [SimpleNamespace(layer_number=number) for number in (7, 8)]
    chunk = SimpleNamespace(decoder=SimpleNamespace(layers=layers))
    assert whole_model_name(name, chunk, first_expert=16) == wanted
