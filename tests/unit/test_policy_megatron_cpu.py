import pytest
import torch

from grpo_recipes.policy.megatron import cpu
from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from policy_models import policy_config, policy_gradient_loss, random_batch, write_llama, write_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched where CUDA is available")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_llama(path)
    return path


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    write_model("mixtral", path)
    return path


def run_one_step(folder) -> None:
    """Passes through everything that a patch is for."""
    policy = MegatronPolicy(policy_config(folder), 1.0, 10, folder, seed=3)
    # Megatron keeps named random streams beside the default one, which is left seeded with the given seed.
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(3)))
    stats = policy.train([random_batch(4)], policy_gradient_loss)
    assert stats.grad_norm > 0


@pytest.mark.parametrize("patch", [p for p in cpu.PATCHES if p.layout == "one process"], ids=str)
def test_megatron_fails_without(patch, folder):
    """If this passes without the patch, upstream no longer needs it: delete its row."""
    with cpu.without(patch), pytest.raises((AssertionError, RuntimeError, TypeError)):
        run_one_step(folder)


@pytest.mark.parametrize("patch", [p for p in cpu.PATCHES if p.layout == "experts"], ids=str)
def test_megatron_with_experts_fails_without(patch, experts):
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None  # one is made and kept by the first model of a process
    with cpu.without(patch), pytest.raises((AssertionError, RuntimeError, TypeError)):
        run_one_step(experts)


def test_megatron_runs_with_all_of_them(folder, experts):
    run_one_step(folder)
    run_one_step(experts)


def test_installing_again_changes_nothing():
    before = {patch: getattr(cpu._find(patch.owner), patch.attribute) for patch in cpu.PATCHES}
    cpu.install()
    assert {patch: getattr(cpu._find(patch.owner), patch.attribute) for patch in cpu.PATCHES} == before


def test_nothing_is_patched_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_originals", {})
    monkeypatch.setattr(cpu, "PATCHES", (cpu.Patch("torch.Tensor", "no_such_attribute", None, "", ""),))
    cpu.install()
    assert cpu._originals == {}


def test_other_code_sees_the_true_names_of_types():
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64
