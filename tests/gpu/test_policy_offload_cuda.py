"""Memory that the trainer gives back is the device's again."""

import pytest
import torch

from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from policy_models import policy_config, policy_gradient_loss, random_batch, weights_of, write_model


@pytest.mark.timeout(300)
def test_offloaded_memory_is_free(tmp_path):
    write_model("llama", tmp_path, hidden_size=1024, intermediate_size=4096)
    policy = MegatronPolicy(policy_config(tmp_path, precision="bfloat16"), 1.0, 10, tmp_path)
    policy.train([random_batch(6)], policy_gradient_loss)
    before, weights = torch.cuda.memory_allocated(), weights_of(policy)
    parameters = sum(p.numel() for p in policy.model[0].parameters())
    kept = sum(tensor.nbytes for tensor in weights.values())
    policy.offload("optimizer")
    after_optimizer = torch.cuda.memory_allocated() - kept
    policy.offload("weights")
    after_weights = torch.cuda.memory_allocated() - kept
    # float32: gradients, main weights and two moments; then bfloat16 weights
    assert before - after_optimizer >= 16 * parameters
    assert after_optimizer - after_weights >= 2 * parameters
    for name, tensor in weights_of(policy).items():
        assert torch.equal(tensor, weights[name]), name
    assert not policy.train([random_batch(6)], policy_gradient_loss).skipped
