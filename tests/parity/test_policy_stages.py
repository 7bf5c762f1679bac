"""Two gloo processes whose pipeline stages hold different numbers of layers, virtual stages included: against
transformers, against one process, and checkpoints from one division into the next."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gloo import on_processes
from policy_models import (
    policy_config,
    policy_gradient_loss,
    random_batch,
    reference_gradients,
    reference_outputs,
    weights_of,
    write_llama,
)

LAYERS = 6
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
# name -> keys of megatron_cfg, layers (from 0) of each chunk of each rank
STAGES = {
    "four in the first": ({"num_layers_in_first_pipeline_stage": 4}, [[[0, 1, 2, 3]], [[4, 5]]]),
    "five in the last": ({"num_layers_in_last_pipeline_stage": 5}, [[[0]], [[1, 2, 3, 4, 5]]]),
    "layout": ({"pipeline_model_parallel_layout": "Ettttt|tL"}, [[[0, 1, 2, 3, 4]], [[5]]]),
    "four in the first, virtual": (
        {"num_layers_in_first_pipeline_stage": 4, **VIRTUAL},
        [[[0, 1], [3, 4]], [[2], [5]]],
    ),
    "layout, virtual": ({"pipeline_model_parallel_layout": "Ett|t|t|ttL", **VIRTUAL}, [[[0, 1], [3]], [[2], [4, 5]]]),
    "embedding and loss counted, virtual": (
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True, **VIRTUAL},
        [[[0], [3, 4]], [[1, 2], [5]]],
    ),
}
TEMPERATURE = 0.8


def make(folder: Path, keys: dict, **changes):
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    cfg = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-3}, **keys}
    return MegatronPolicy(policy_config(folder, megatron_cfg=cfg, **changes), TEMPERATURE, 10, folder)


def microbatches(step: int) -> list:
    batch = random_batch(11, seed=step)
    return [batch.select(part) for part in (range(0, 3), range(3, 5), range(5, 6), range(6, 11))]


def worker(rank: int, folder: Path, out: Path) -> dict:
    found: dict = {}
    before = None
    for name, (keys, _) in STAGES.items():
        policy = make(folder, {"pipeline_model_parallel_size": 2, **keys})
        layers = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in policy.built.chunks]
        logprobs = policy.logprobs(microbatches(0))
        policy.accumulate(microbatches(0), policy_gradient_loss)
        gradients = policy.gradients()
        policy.train(microbatches(0), policy_gradient_loss)
        trained = weights_of(policy)
        saved = out / name
        saved.mkdir(exist_ok=True)
        policy.save(saved)
        if before is not None:
            policy.load(before)  # another division, the same step
        found[name] = {
            "layers": layers,
            "logprobs": logprobs,
            "gradients": gradients,
            "trained": trained,
            "loaded": weights_of(policy),
            "more": policy.train(microbatches(1), policy_gradient_loss),
        }
        before = saved
        policy.close()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("stages")
    folder = out / "llama"
    model = write_llama(folder, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    one = make(folder, {})
    one.train(microbatches(0), policy_gradient_loss)
    trained = weights_of(one)
    more = one.train(microbatches(1), policy_gradient_loss)
    ranks = on_processes(2, worker, out, folder, out)
    return model, trained, more, ranks


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_holds_its_layers(name, results):
    ranks = results[-1]
    assert [ranks[rank][name]["layers"] for rank in (0, 1)] == STAGES[name][1]


@pytest.mark.parametrize("name", STAGES)
def test_logprobs_and_gradients_equal_transformers(name, results):
    model, _, _, ranks = results
    wanted = reference_gradients(model, random_batch(11), TEMPERATURE)
    for rank in (0, 1):
        found = ranks[rank][name]
        for batch, logprobs in zip(microbatches(0), found["logprobs"], strict=True):
            with torch.no_grad():
                exact, _ = reference_outputs(model, batch, TEMPERATURE)
            torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=0)
        assert found["gradients"].keys() == wanted.keys()
        for key, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient.double(), wanted[key], atol=1e-5, rtol=1e-4, msg=f"{rank} {key}")


@pytest.mark.parametrize("name", STAGES)
def test_training_equals_one_process(name, results):
    _, trained, more, ranks = results
    for rank in (0, 1):
        found = ranks[rank][name]
        for key, wanted in trained.items():
            torch.testing.assert_close(found["trained"][key], wanted, atol=1e-5, rtol=0)
        assert found["more"].loss == pytest.approx(more.loss, abs=1e-5)
        assert found["more"].grad_norm == pytest.approx(more.grad_norm, rel=1e-4)


def test_a_checkpoint_goes_from_one_division_into_the_next(results):
    ranks = results[-1]
    names = list(STAGES)
    for before, name in pairwise(names):
        for rank in (0, 1):
            saved, loaded = ranks[rank][before]["trained"], ranks[rank][name]["loaded"]
            assert all(torch.equal(loaded[key], tensor) for key, tensor in saved.items()), (before, name)
