"""Two gloo processes against transformers and against one process: tensor, pipeline and data parallelism, and
checkpoints that go from one layout to another."""

from pathlib import Path

import pytest
import torch

from gloo import on_processes
from grpo_recipes.policy.contract import empty_batch
from grpo_recipes.policy.megatron import cpu
from policy_models import (
    policy_config,
    policy_gradient_loss,
    random_batch,
    reference_gradients,
    reference_outputs,
    weights_of,
    write_llama,
)

LAYOUTS = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
}
TEMPERATURE = 0.8
STEPS = 3


def make(folder: Path, layout: str, **changes):
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    cfg = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-3}, **LAYOUTS[layout]}
    return MegatronPolicy(policy_config(folder, megatron_cfg=cfg, **changes), TEMPERATURE, 10, folder)


def microbatches(step: int, layout: str, rank: int):
    """Three microbatches of uneven size; under data parallelism rank 0 gets two of them, rank 1 one and an empty one."""
    batch = random_batch(11, seed=step)
    cut = [batch.select(part) for part in (range(0, 5), range(5, 6), range(6, 11))]
    if layout != "dp2":
        return cut
    return cut[:2] if rank == 0 else [cut[2], empty_batch()]


def run(folder: Path, out: Path, layout: str, rank: int) -> dict:
    policy = make(folder, layout)
    logprobs = policy.logprobs(microbatches(0, layout, rank))
    stats = [policy.train(microbatches(step, layout, rank), policy_gradient_loss) for step in range(STEPS)]
    checkpoint = out / f"checkpoint {layout}"
    checkpoint.mkdir(exist_ok=True)
    policy.save(checkpoint)
    weights = weights_of(policy)
    more = policy.train(microbatches(STEPS, layout, rank), policy_gradient_loss)
    export = out / f"export {layout}"
    export.mkdir(exist_ok=True)
    policy.export(export)
    plan = [(spec.name, spec.shape) for spec in policy.weight_plan()]
    return {"logprobs": logprobs, "stats": stats, "weights": weights, "plan": plan, "more": more}


def resume(folder: Path, out: Path, source: str, layout: str, rank: int) -> dict:
    policy = make(folder, layout, initial_weights="random", init_seed=9)
    policy.load(out / f"checkpoint {source}")
    weights = weights_of(policy)
    return {"weights": weights, "more": policy.train(microbatches(STEPS, layout, rank), policy_gradient_loss)}


PARALLEL_PATCHES = [
    patch for patch in cpu.PATCHES if patch.layout in ("sequence parallel", "pipeline", "tied pipeline")
]


def trains_without(patch: cpu.Patch, folder: Path, rank: int) -> bool:
    layout = "tp2 sp" if patch.layout == "sequence parallel" else "pp2"
    try:
        with cpu.without(patch):
            policy = make(folder, layout)
            policy.train(microbatches(0, layout, rank), policy_gradient_loss)
    except (AssertionError, RuntimeError):
        return False
    return True


def worker(rank: int, folder: Path, out: Path) -> dict:
    found = {layout: run(folder, out, layout, rank) for layout in LAYOUTS if layout != "one"}
    for source, layout in (("one", "tp2 sp"), ("tp2", "dp2"), ("dp2", "pp2"), ("pp2", "tp2")):
        found[source, layout] = resume(folder, out, source, layout, rank)
    found["without"] = {str(patch): trains_without(patch, folder, rank) for patch in PARALLEL_PATCHES}
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def results(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("parallel")
    folder = out / "llama"
    model = write_llama(folder, tie_word_embeddings=request.param)
    one = run(folder, out, "one", 0)
    ranks = on_processes(2, worker, out, folder, out)
    ranks.append({("dp2", "one"): resume(folder, out, "dp2", "one", 0)})
    return model, one, ranks, out


PARALLEL = [layout for layout in LAYOUTS if layout != "one"]


@pytest.mark.parametrize("layout", PARALLEL)
def test_logprobs_equal_transformers(layout, results):
    model, _, ranks, _ = results
    for rank in (0, 1):
        for batch, found in zip(microbatches(0, layout, rank), ranks[rank][layout]["logprobs"], strict=True):
            with torch.no_grad():
                wanted, _ = reference_outputs(model.double(), batch, TEMPERATURE)
            torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", PARALLEL)
def test_gradient_norm_loss_and_counts_equal_transformers(layout, results):
    """Covers: data-parallel ranks with fewer tokens count more; a gradient averaged over ranks instead of summed."""
    model, _, ranks, _ = results
    batch = random_batch(11)
    exact = reference_gradients(model, batch, TEMPERATURE)
    norm = sum(float(g.square().sum()) for g in exact.values()) ** 0.5
    _, entropy = reference_outputs(model, batch, TEMPERATURE)
    for rank in (0, 1):
        stats = ranks[rank][layout]["stats"][0]
        assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
        assert stats.sums["tokens"] == float(batch.mask.sum())
        assert stats.sums["entropy"] == pytest.approx(float((entropy * batch.mask).sum()), rel=1e-5)
    assert ranks[0][layout]["stats"] == ranks[1][layout]["stats"]


@pytest.mark.parametrize("layout", PARALLEL)
def test_training_equals_one_process(layout, results):
    """Covers: Tensor- or pipeline-parallel size in the denominator."""
    _, one, ranks, _ = results
    for rank in (0, 1):
        found = ranks[rank][layout]
        assert found["plan"] == one["plan"]
        for mine, wanted in zip(found["stats"], one["stats"], strict=True):
            assert mine.loss == pytest.approx(wanted.loss, abs=1e-5)
            assert mine.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        for name, wanted in one["weights"].items():
            torch.testing.assert_close(found["weights"][name], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("source", "layout"), [("one", "tp2 sp"), ("tp2", "dp2"), ("dp2", "pp2"), ("pp2", "tp2"), ("dp2", "one")]
)
def test_a_checkpoint_loads_under_another_layout(source, layout, results):
    _, one, ranks, _ = results
    for rank in (2,) if layout == "one" else (0, 1):
        found = ranks[rank][source, layout]
        origin = one if source == "one" else ranks[0][source]
        assert all(torch.equal(found["weights"][n], w) for n, w in origin["weights"].items())
        assert found["more"].loss == pytest.approx(origin["more"].loss, abs=1e-5)
        assert found["more"].grad_norm == pytest.approx(origin["more"].grad_norm, rel=1e-4)


@pytest.mark.parametrize("layout", PARALLEL)
def test_exports_are_equal(layout, results):
    from safetensors.torch import load_file

    out = results[-1]
    wanted = load_file(out / "export one" / "model.safetensors")
    found = load_file(out / f"export {layout}" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched where CUDA is available")
@pytest.mark.parametrize("patch", PARALLEL_PATCHES, ids=str)
def test_megatron_fails_without(patch, results):
    """If this passes without the patch, upstream no longer needs it: delete its row."""
    model, _, ranks, _ = results
    if patch.layout == "tied pipeline" and not model.config.tie_word_embeddings:
        return
    assert [ranks[rank]["without"][str(patch)] for rank in (0, 1)] == [False, False]
