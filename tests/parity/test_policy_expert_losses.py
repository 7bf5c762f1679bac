"""Two gloo processes: the losses that experts add by themselves weigh the same under every layout as on one process, and
so where gradients are reduced while others are still computed."""

from pathlib import Path

import pytest
import torch

from gloo import on_processes
from policy_models import policy_config, policy_gradient_loss, random_batch, write_model

PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS = {
    "cp2": {"context_parallel_size": 2},
    "tp2 sp": TP2,
    "dp2": {},
    "dp2 ep2": EP2,
    "dp2 ep2, overlapping": EP2
    | {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 2000}},
    "tp2 sp ep2": TP2 | EP2,
    "virtual": PP2 | {"virtual_pipeline_model_parallel_size": 2},
}
LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}


def microbatches() -> list:
    """Sequences of lengths that no layout pads: padding is routed, too, and would count."""
    batch = random_batch(8, seed=3, shortest=12, longest=12)
    return [batch.select(part) for part in (range(0, 1), range(1, 4), range(4, 6), range(6, 8))]


def gradients(folder: Path, layout: dict) -> dict:
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    cfg = {"optimizer": {"lr": 1e-3}, **LOSSES, **layout}
    policy = MegatronPolicy(policy_config(folder, megatron_cfg=cfg), 0.8, 10, folder)
    policy.accumulate(microbatches()[policy.replica.data_rank :: policy.replica.data_size], policy_gradient_loss)
    found = policy.gradients()
    policy.close()
    return found


def worker(rank: int, folder: Path) -> dict:
    return {name: gradients(folder, layout) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("losses")
    folder = out / "model"
    write_model("qwen3_moe", folder, num_hidden_layers=4)
    one = gradients(folder, {})
    return one, on_processes(2, worker, out, folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_one_process(name, results):
    """Covers: context parallel counted as data parallel; data-parallel ranks with fewer tokens count more."""
    one, ranks = results
    for rank in (0, 1):
        assert ranks[rank][name].keys() == one.keys()
        for key, gradient in ranks[rank][name].items():
            bound = 2e-5 * float(one[key].abs().max())
            torch.testing.assert_close(gradient, one[key], atol=bound, rtol=0, msg=lambda m, k=key: f"{k}: {m}")
