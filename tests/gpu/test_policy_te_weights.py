"""TransformerEngine's layers hold weights under other names and in other pieces: in and out again unchanged."""

import pytest
import torch

from policy_models import policy_config, random_batch, write_model

pytestmark = pytest.mark.gpu

# TransformerEngine wants multiples of 16.
SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 48}


def make(folder, **megatron):
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    cfg = {"optimizer": {"lr": 1e-3}, **megatron}
    return MegatronPolicy(policy_config(folder, precision="bfloat16", megatron_cfg=cfg), 1.0, 10, folder)


@pytest.mark.parametrize(
    ("family", "megatron"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("qwen3_moe", {}), ("qwen3_moe", {"moe_grouped_gemm": True})],
    ids=["llama", "qwen2", "qwen3", "qwen3_moe one by one", "qwen3_moe grouped"],
)
def test_weights_come_out_as_they_went_in(family, megatron, tmp_path):
    from safetensors.torch import load_file

    moe = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    write_model(family, tmp_path, dtype=torch.bfloat16, **SIZES, **moe)
    policy = make(tmp_path, **megatron)
    assert policy.describe()["layer_spec"] == "transformer_engine"
    wanted = load_file(tmp_path / "model.safetensors")
    found = {name: tensor.cpu() for bucket in policy.weight_buckets() for name, tensor in bucket.items()}
    assert found.keys() == {name for name in wanted if name != "lm_head.weight" or family != "qwen2"}
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_grouped_products_of_experts_equal_single_ones(tmp_path):
    """bfloat16, the same weights: where both send a token to the same experts its logprobs differ by rounding only."""
    write_model("qwen3_moe", tmp_path, moe_intermediate_size=32, initializer_range=0.1, **SIZES)
    batch = random_batch(40, seed=3)
    [single] = make(tmp_path).logprobs([batch])
    [grouped] = make(tmp_path, moe_grouped_gemm=True).logprobs([batch])
    difference = (single - grouped).abs()
    assert single.abs().max() > 1
    assert difference.median() < 5e-3
    assert (difference < 5e-2).float().mean() > 0.95


def test_reference_logprobs_leave_the_weights_alone(tmp_path):
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy
    from policy_models import policy_gradient_loss, weights_of

    write_model("llama", tmp_path, **SIZES)
    cfg = policy_config(tmp_path, precision="bfloat16", megatron_cfg={"optimizer": {"lr": 1e-2}})
    policy = MegatronPolicy(cfg, 1.0, 10, tmp_path, needs_reference=True)
    batch = random_batch(6)
    [start] = policy.logprobs([batch])
    policy.train([batch], policy_gradient_loss)
    before = weights_of(policy)
    [reference] = policy.reference_logprobs([batch])
    assert torch.equal(reference, start)
    after = weights_of(policy)
    assert all(torch.equal(after[name], before[name]) for name in before)
