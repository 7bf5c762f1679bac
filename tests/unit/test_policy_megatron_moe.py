"""The losses of a mixture of experts itself, and a frozen router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_recipes.policy.contract import Batch, LossInputs, LossOutputs
from grpo_recipes.policy.megatron import trainer
from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from policy_models import policy_config, policy_gradient_loss, random_batch, write_model

EXPERTS, CHOSEN = 6, 2


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One layer, so that its router's input does not depend on the auxiliary losses."""
    folder = tmp_path_factory.mktemp("experts")
    return folder, write_model("qwen3_moe", folder, num_hidden_layers=1)


def make(folder: Path, **megatron: Any) -> MegatronPolicy:
    cfg = {"optimizer": {"lr": 1e-2}, **megatron}
    return MegatronPolicy(policy_config(folder, megatron_cfg=cfg), 1.0, 10, folder)


def nothing(inputs: LossInputs) -> LossOutputs:
    """A loss without any gradient: what is left are the losses that the experts add."""
    return LossOutputs((inputs.logprobs * 0).sum(), {}, {})


def router_gradient(policy: MegatronPolicy, microbatches: list[Batch]) -> Tensor:
    policy.accumulate(microbatches, nothing)
    return policy.built.chunks[0].decoder.layers[0].mlp.router.weight.main_grad.clone().double()


def router_inputs(model: Any, batch: Batch) -> Tensor:
    """float64 [T, hidden], what transformers' router sees."""
    seen: list[Tensor] = []
    model = model.double()
    handle = model.model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        for ids in batch.token_ids.split(batch.lengths.tolist()):
            model(ids[None])
    handle.remove()
    return torch.cat([hidden.reshape(-1, hidden.shape[-1]) for hidden in seen])


def expected(model: Any, microbatches: list[Batch], aux: float, z: float) -> Tensor:
    """Gradient of sum over m of T_m / T (aux E sum f_i P_i + z mean logsumexp^2), in float64."""
    weight = model.double().model.layers[0].mlp.gate.weight.detach().clone().requires_grad_()
    total = sum(len(batch.token_ids) for batch in microbatches)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in microbatches:
        logits = router_inputs(model, batch) @ weight.T
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN).indices, 1.0)
        load = chosen.sum(0) / (CHOSEN * len(logits))
        balance = EXPERTS * (load * logits.softmax(-1).mean(0)).sum()
        loss = loss + len(logits) / total * (aux * balance + z * logits.logsumexp(-1).square().mean())
    loss.backward()
    return weight.grad


@pytest.mark.parametrize(("aux", "z"), [(0.1, 0.0), (0.0, 0.1), (0.3, 0.1)])
@pytest.mark.parametrize("parts", [1, 4])
def test_the_auxiliary_losses_are_means_over_the_step(
    aux: float, z: float, parts: int, experts: tuple[Path, Any]
) -> None:
    """Covers: a loss whose weight depends on the number of microbatches."""
    folder, model = experts
    settings = {"moe_z_loss_coeff": z} if z else {}
    if aux:
        settings |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": aux}
    batch = random_batch(12)
    microbatches = [batch.select(range(part, 12, parts)) for part in range(parts)]
    found = router_gradient(make(folder, **settings), microbatches)
    torch.testing.assert_close(found, expected(model, microbatches, aux, z), atol=1e-7, rtol=1e-4)
    assert found.abs().max() > 1e-4


def test_equal_microbatches_weigh_as_much_as_one(experts: tuple[Path, Any]) -> None:
    policy = make(experts[0], moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01)
    batch = random_batch(5)
    four = router_gradient(policy, [batch] * 4)
    torch.testing.assert_close(four, router_gradient(policy, [batch]), atol=1e-7, rtol=1e-5)


def test_without_the_scale_the_losses_would_count_once_a_token(
    experts: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What set_aux_loss_scale mends; fails when Megatron-Core no longer multiplies by tokens."""
    policy = make(experts[0], moe_z_loss_coeff=0.1)
    batch = random_batch(5)
    right = router_gradient(policy, [batch])
    policy.built.config.moe_grad_scale_func = None
    monkeypatch.setattr(trainer, "set_aux_loss_scale", lambda *_: None)
    policy.accumulate([batch], nothing)
    raw = policy.built.chunks[0].decoder.layers[0].mlp.router.weight.main_grad.double()
    torch.testing.assert_close(raw, right * len(batch.token_ids), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_router_keeps_its_weights(frozen: bool, experts: tuple[Path, Any]) -> None:
    policy = make(experts[0], freeze_moe_router=frozen)
    router = policy.built.chunks[0].decoder.layers[0].mlp.router.weight
    other = policy.built.chunks[0].embedding.word_embeddings.weight
    before = router.detach().clone(), other.detach().clone()
    for seed in range(2):
        policy.train([random_batch(6, seed=seed)], policy_gradient_loss)
    assert torch.equal(router, before[0]) is frozen
    assert not torch.equal(other, before[1])
    assert any(name.endswith("mlp.gate.weight") for bucket in policy.weight_buckets() for name in bucket)


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_router_dtype": "fp64"},
        {"moe_token_dispatcher_type": "allgather"},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"activation_checkpointing": True},
    ],
    ids=["fp64 router", "all-gather", "recomputed experts", "recomputed layers"],
)
def test_settings_that_change_no_gradient(settings: dict[str, Any], experts: tuple[Path, Any]) -> None:
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    batch = random_batch(6)
    found = []
    for chosen in ({}, settings):
        policy = make(experts[0], **balanced, **chosen)
        policy.accumulate([batch], policy_gradient_loss)
        found.append(policy.gradients())
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_load_of_every_expert_equals_the_choices_of_transformers(experts):
    folder, model = experts
    batch = random_batch(9, seed=4)
    policy = make(folder, sequence_parallel=False)
    stats = policy.train([batch.select(range(4)), batch.select(range(4, 9))], policy_gradient_loss)
    gate = model.double().model.layers[0].mlp.gate
    logits = router_inputs(model, batch) @ gate.weight.detach().T
    counts = torch.bincount(logits.topk(CHOSEN).indices.flatten(), minlength=EXPERTS).double()
    [load] = stats.expert_load
    assert load == pytest.approx((counts * EXPERTS / counts.sum()).tolist())
    assert sum(load) == pytest.approx(EXPERTS)


def test_a_dense_model_has_no_load(tmp_path):
    write_model("llama", tmp_path)
    stats = make(tmp_path).train([random_batch(3)], policy_gradient_loss)
    assert stats.expert_load == ()
