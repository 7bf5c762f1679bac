"""Every family against transformers: logprobs, gradients, and weights in and out."""

from pathlib import Path

import pytest
import torch

from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from policy_models import (
    LLAMA3_ROPE,
    gradients,
    policy_config,
    random_batch,
    reference_gradients,
    reference_outputs,
    write_model,
)

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
