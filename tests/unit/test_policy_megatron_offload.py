"""The trainer's memory goes away and comes back when it is needed, without a trace."""

import pytest
import torch

from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from policy_models import policy_config, policy_gradient_loss, random_batch, weights_of, write_model


def trained(folder, precision, between=lambda policy: None):
    """Weights and statistics of three steps, `between` before each and once after the last."""
    policy = MegatronPolicy(policy_config(folder, precision=precision), 1.0, 10, folder)
    stats = []
    for step in range(3):
        between(policy)
        stats.append(policy.train([random_batch(6, seed=step)], policy_gradient_loss))
    between(policy)
    return weights_of(policy), stats, policy.logprobs([random_batch(4)])


def all_away(policy):
    for part in ("optimizer", "weights", "optimizer"):
        policy.offload(part)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_training_goes_on_bit_for_bit(tmp_path, family, precision):
    write_model(family, tmp_path, tie_word_embeddings=family == "llama")
    plain, moved = trained(tmp_path, precision), trained(tmp_path, precision, all_away)
    assert moved[1] == plain[1]
    assert all(torch.equal(moved[0][name], plain[0][name]) for name in plain[0])
    assert all(map(torch.equal, moved[2], plain[2]))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_away_takes_no_memory(tmp_path, precision):
    write_model("llama", tmp_path)
    policy = MegatronPolicy(policy_config(tmp_path, precision=precision), 1.0, 10, tmp_path)
    policy.train([random_batch(6)], policy_gradient_loss)
    [buffer] = policy.model[0].buffers
    moments = [s["exp_avg"] for s in policy.optimizer.chained_optimizers[0].optimizer.state.values()]
    weights = next(policy.model[0].parameters())

    policy.offload("optimizer")
    assert all(t.untyped_storage().nbytes() == 0 for t in (buffer.grad_data, *moments))
    before = policy.logprobs([random_batch(4)])  # needs no more than the weights
    policy.offload("weights")
    assert weights.untyped_storage().nbytes() == 0
    assert torch.equal(policy.logprobs([random_batch(4)])[0], before[0])
    assert weights.untyped_storage().nbytes()
    assert buffer.grad_data.untyped_storage().nbytes() == 0
    policy.train([random_batch(6)], policy_gradient_loss)
    assert buffer.grad_data.untyped_storage().nbytes() == buffer.grad_data.nbytes


@pytest.mark.timeout(120)
def test_a_checkpoint_of_what_is_away_is_whole(tmp_path):
    write_model("llama", tmp_path / "model")
    policy = MegatronPolicy(policy_config(tmp_path / "model"), 1.0, 10, tmp_path / "model")
    policy.train([random_batch(6)], policy_gradient_loss)
    (tmp_path / "here").mkdir()
    (tmp_path / "away").mkdir()
    here = policy.save(tmp_path / "here")
    all_away(policy)
    assert policy.save(tmp_path / "away") == here
