"""Checkpoints on a GPU, for every optimizer that Megatron-Core can put there: resumed exactly, exported as the trainer
exports, and written from pinned memory while the next steps run."""

import pytest
import torch

from policy_models import policy_config, policy_gradient_loss, random_batch, weights_of, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BATCHES = [random_batch(6, seed=step) for step in range(6)]
PRECISION_AWARE = {"use_precision_aware_optimizer": True, "store_param_remainders": False}
OFFLOAD = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
OPTIMIZERS = {
    "float32 main weights": {},
    "precision aware": PRECISION_AWARE,
    "precision aware, bfloat16 moments": PRECISION_AWARE
    | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    "half in host memory": OFFLOAD | {"optimizer_offload_fraction": 0.5},
    "all in host memory": OFFLOAD | {"optimizer_offload_fraction": 1.0},
    "precision aware in host memory": PRECISION_AWARE | OFFLOAD | {"optimizer_offload_fraction": 0.5},
}


def make(folder, optimizer, **changes):
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    cfg = {"optimizer": {"lr": 1e-2, "weight_decay": 0.1, **optimizer}}
    config = policy_config(folder, megatron_cfg=cfg, precision="bfloat16", **changes)
    return MegatronPolicy(config, 1.0, 9, folder)


def state_of(folder):
    from grpo_recipes.policy.megatron.shards import STATES, SavedState

    saved = SavedState(folder)
    return {(s, n): saved.whole(s, n) for s in STATES for n, _ in saved._pieces}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_checkpoint_comes_back_whole(optimizer, tmp_path):
    from grpo_recipes.policy.megatron.shards import SavedState

    model = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 64}
    write_model("llama", tmp_path / "model", **model)
    policy = make(tmp_path / "model", optimizer)
    for name in ("start", "one", "again", "next", "next again"):
        (tmp_path / name).mkdir()
    policy.save(tmp_path / "start")  # before there are moments
    for batch in BATCHES[:2]:
        policy.train([batch], policy_gradient_loss)
    policy.start_save(tmp_path / "one")
    wanted = weights_of(policy)
    policy.train(BATCHES[2:3], policy_gradient_loss)
    digests = policy.finish_save(wait=True)
    assert policy._checkpoints._host._block.is_pinned() or optimizer == OPTIMIZERS["all in host memory"]
    policy.save(tmp_path / "next")

    again = make(tmp_path / "model", optimizer, initial_weights="random", init_seed=5)
    again.load(tmp_path / "start")
    again.train(BATCHES[3:4], policy_gradient_loss)  # a used optimizer
    again.load(tmp_path / "one")
    assert all(torch.equal(weight, wanted[name]) for name, weight in weights_of(again).items())
    saved = SavedState(tmp_path / "one")
    assert all(torch.equal(wanted[name].cpu(), tensor) for name, tensor in saved.exported())
    assert saved.optimizer_steps == 2
    assert {n: d for n, d in again.save(tmp_path / "again").items() if n == "model.json"} == {
        "model.json": digests["model.json"]
    }
    first, second = state_of(tmp_path / "one"), state_of(tmp_path / "again")
    assert all(torch.equal(first[key], second[key]) for key in first)
    again.train(BATCHES[2:3], policy_gradient_loss)
    again.save(tmp_path / "next again")
    first, second = state_of(tmp_path / "next"), state_of(tmp_path / "next again")
    for key, tensor in first.items():  # gradients are summed with atomics: the last bits may differ
        torch.testing.assert_close(second[key], tensor, atol=1e-5, rtol=2e-2)


def test_what_a_save_costs_a_step(tmp_path):
    """Printed, not judged."""
    import time

    model = {"hidden_size": 2048, "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 4}
    write_model("llama", tmp_path / "model", **model, num_hidden_layers=8, intermediate_size=8192, vocab_size=32000)
    policy = make(tmp_path / "model", {})
    policy.train(BATCHES[:1], policy_gradient_loss)
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        torch.cuda.synchronize()
        start = time.perf_counter()
        policy.start_save(tmp_path / str(number))
        begun = time.perf_counter() - start
        policy.finish_save(wait=True)
        size = len(policy._checkpoints._host._block) / 1e9
        print(
            f"save {number}: {size:.1f} GB, step waits {begun:.3f} s, written after {time.perf_counter() - start:.1f} s"
        )
