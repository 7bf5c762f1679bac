"""Both trainers on several gloo processes against transformers and against one process: tensor, pipeline, context and
data parallelism, and checkpoints that go from one layout to another."""

from pathlib import Path

import pytest
import torch

from gloo import on_processes
from grpo_recipes.policy.contract import empty_batch
from grpo_recipes.policy.megatron import cpu
from policy_models import (
    make_policy,
    policy_gradient_loss,
    random_batch,
    reference_gradients,
    reference_outputs,
    weights_of,
    write_llama,
)

pytestmark = pytest.mark.timeout(600)

SP = {"sequence_parallel": True}
LAYOUTS = {
    "megatron": {
        "one": {},
        "tp2": {"tensor_model_parallel_size": 2},
        "tp2 sp": {"tensor_model_parallel_size": 2, **SP},
        "pp2": {"pipeline_model_parallel_size": 2},
        "dp2": {},
    },
    "dtensor": {
        "one": {},
        "tp2": {"tensor_parallel_size": 2},
        "tp2 sp": {"tensor_parallel_size": 2, **SP},
        "cp2": {"context_parallel_size": 2},
        "dp2": {},
        "dp2 tp2 sp": {"tensor_parallel_size": 2, **SP},
        "cp2 tp2": {"context_parallel_size": 2, "tensor_parallel_size": 2},
    },
}
ON_FOUR = ("dp2 tp2 sp", "cp2 tp2")
# Saved under one layout, loaded under another.
RESUMES = {
    "megatron": [("one", "tp2 sp"), ("tp2", "dp2"), ("dp2", "pp2"), ("pp2", "tp2"), ("dp2", "one")],
    "dtensor": [
        ("one", "tp2 sp"),
        ("tp2", "dp2"),
        ("dp2", "cp2"),
        ("cp2", "tp2"),
        ("tp2 sp", "dp2 tp2 sp"),
        ("dp2 tp2 sp", "cp2 tp2"),
        ("dp2 tp2 sp", "one"),
    ],
}
VOCABULARY = {"megatron": 17, "dtensor": 18}  # Megatron pads it, DTensor cuts it evenly
TEMPERATURE = 0.8
STEPS = 3


def make(folder: Path, backend: str, layout: str, **changes):
    optimizer = {"lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-3}
    return make_policy(
        backend, folder, LAYOUTS[backend][layout], optimizer=optimizer, temperature=TEMPERATURE, steps=10, **changes
    )


def microbatches(step: int, layout: str, data_rank: int):
    """Three microbatches of uneven size; of two data-parallel ranks the first gets two of them, the other one and an
    empty one."""
    batch = random_batch(11, seed=step)
    cut = [batch.select(part) for part in (range(0, 5), range(5, 6), range(6, 11))]
    if "dp2" not in layout:
        return cut
    return cut[:2] if data_rank == 0 else [cut[2], empty_batch()]


def run(folder: Path, out: Path, backend: str, layout: str) -> dict:
    policy = make(folder, backend, layout)
    mine = policy.replica.data_rank
    logprobs = policy.logprobs(microbatches(0, layout, mine))
    policy.accumulate(microbatches(0, layout, mine), policy_gradient_loss)
    gradients = policy.gradients()
    stats = [policy.train(microbatches(step, layout, mine), policy_gradient_loss) for step in range(STEPS)]
    checkpoint = out / f"checkpoint {layout}"
    checkpoint.mkdir(exist_ok=True)
    policy.save(checkpoint)
    weights = weights_of(policy)
    more = policy.train(microbatches(STEPS, layout, mine), policy_gradient_loss)
    export = out / f"export {layout}"
    export.mkdir(exist_ok=True)
    policy.export(export)
    plan = [(spec.name, spec.shape) for spec in policy.weight_plan()]
    found = {"logprobs": logprobs, "gradients": gradients, "stats": stats, "weights": weights, "plan": plan}
    return {**found, "more": more, "data rank": mine}


def resume(folder: Path, out: Path, backend: str, source: str, layout: str) -> dict:
    policy = make(folder, backend, layout, initial_weights="random", init_seed=9)
    policy.load(out / f"checkpoint {source}")
    weights = weights_of(policy)
    more = policy.train(microbatches(STEPS, layout, policy.replica.data_rank), policy_gradient_loss)
    return {"weights": weights, "more": more}


PARALLEL_PATCHES = [
    patch for patch in cpu.PATCHES if patch.layout in ("sequence parallel", "pipeline", "tied pipeline")
]


def trains_without(patch: cpu.Patch, folder: Path, rank: int) -> bool:
    layout = "tp2 sp" if patch.layout == "sequence parallel" else "pp2"
    try:
        with cpu.without(patch):
            policy = make(folder, "megatron", layout)
            policy.train(microbatches(0, layout, rank), policy_gradient_loss)
    except (AssertionError, RuntimeError):
        return False
    return True


def worker(rank: int, backend: str, folder: Path, out: Path, layouts: list[str]) -> dict:
    found = {layout: run(folder, out, backend, layout) for layout in layouts}
    for source, layout in RESUMES[backend]:
        if layout in layouts:
            found[source, layout] = resume(folder, out, backend, source, layout)
    if backend == "megatron":
        found["without"] = {str(patch): trains_without(patch, folder, rank) for patch in PARALLEL_PATCHES}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(backend, tied) -> model, what one process finds, what each rank of each layout finds, folder; made once."""
    made = {}

    def of(backend: str, tied: bool):
        if (backend, tied) not in made:
            made[backend, tied] = find(backend, tied, tmp_path_factory.mktemp("parallel"))
        return made[backend, tied]

    return of


def find(backend: str, tied: bool, out: Path):
    folder = out / "llama"
    model = write_llama(folder, tie_word_embeddings=tied, vocab_size=VOCABULARY[backend])
    one = run(folder, out, backend, "one")
    ranks = {}
    for count in (2, 4):
        layouts = [n for n in LAYOUTS[backend] if n != "one" and (n in ON_FOUR) == (count == 4)]
        if layouts:
            (out / str(count)).mkdir()
            for rank, found in enumerate(on_processes(count, worker, out / str(count), backend, folder, out, layouts)):
                ranks.setdefault(rank, {}).update(found)
    for source, layout in RESUMES[backend]:
        if layout == "one":
            ranks[0][source, layout] = resume(folder, out, backend, source, layout)
    return model, one, ranks, out


def ranks_of(layout: str) -> range:
    return range(1 if layout == "one" else 4 if layout in ON_FOUR else 2)


PARALLEL = [(backend, layout) for backend, layouts in LAYOUTS.items() for layout in layouts if layout != "one"]
every_layout = pytest.mark.parametrize(("backend", "layout"), PARALLEL)
both_models = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@both_models
@every_layout
def test_logprobs_equal_transformers(backend, layout, tied, results):
    model, _, ranks, _ = results(backend, tied)
    for rank in ranks_of(layout):
        mine = microbatches(0, layout, ranks[rank][layout]["data rank"])
        for batch, found in zip(mine, ranks[rank][layout]["logprobs"], strict=True):
            with torch.no_grad():
                wanted, _ = reference_outputs(model.double(), batch, TEMPERATURE)
            torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)


@both_models
@every_layout
def test_gradients_loss_and_counts_equal_transformers(backend, layout, tied, results):
    """Covers: data-parallel ranks with fewer tokens count more; a gradient averaged over ranks instead of summed;
    context parallel counted as data parallel."""
    model, _, ranks, _ = results(backend, tied)
    batch = random_batch(11)
    exact = reference_gradients(model, batch, TEMPERATURE)
    norm = sum(float(g.square().sum()) for g in exact.values()) ** 0.5
    _, entropy = reference_outputs(model, batch, TEMPERATURE)
    for rank in ranks_of(layout):
        stats = ranks[rank][layout]["stats"][0]
        assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
        assert stats.sums["tokens"] == float(batch.mask.sum())
        assert stats.sums["entropy"] == pytest.approx(float((entropy.detach() * batch.mask).sum()), rel=1e-5)
        assert ranks[rank][layout]["stats"] == ranks[0][layout]["stats"]
        found = ranks[rank][layout]["gradients"]
        assert found.keys() == exact.keys()
        for name, gradient in exact.items():
            torch.testing.assert_close(
                found[name].double(), gradient, atol=5e-6, rtol=1e-5, msg=lambda m, n=name: n + m
            )


@both_models
@every_layout
def test_training_equals_one_process(backend, layout, tied, results):
    """Covers: Tensor- or pipeline-parallel size in the denominator."""
    _, one, ranks, _ = results(backend, tied)
    for rank in ranks_of(layout):
        found = ranks[rank][layout]
        assert found["plan"] == one["plan"]
        for mine, wanted in zip(found["stats"], one["stats"], strict=True):
            assert mine.loss == pytest.approx(wanted.loss, abs=1e-5)
            assert mine.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        for name, wanted in one["weights"].items():
            torch.testing.assert_close(found["weights"][name], wanted, atol=1e-5, rtol=0)


@both_models
@pytest.mark.parametrize(
    ("backend", "source", "layout"), [(backend, *pair) for backend, pairs in RESUMES.items() for pair in pairs]
)
def test_a_checkpoint_loads_under_another_layout(backend, source, layout, tied, results):
    _, one, ranks, _ = results(backend, tied)
    for rank in ranks_of(layout):
        found = ranks[rank][source, layout]
        origin = one if source == "one" else ranks[0][source]
        assert all(torch.equal(found["weights"][n], w) for n, w in origin["weights"].items())
        assert found["more"].loss == pytest.approx(origin["more"].loss, abs=1e-5)
        assert found["more"].grad_norm == pytest.approx(origin["more"].grad_norm, rel=1e-4)


@both_models
@every_layout
def test_exports_are_equal(backend, layout, tied, results):
    from safetensors.torch import load_file

    out = results(backend, tied)[-1]
    wanted = load_file(out / "export one" / "model.safetensors")
    found = load_file(out / f"export {layout}" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched where CUDA is available")
@both_models
@pytest.mark.parametrize("patch", PARALLEL_PATCHES, ids=str)
def test_megatron_fails_without(patch, tied, results):
    """If this passes without the patch, upstream no longer needs it: delete its row."""
    if patch.layout == "tied pipeline" and not tied:
        return
    ranks = results("megatron", tied)[2]
    assert [ranks[rank]["without"][str(patch)] for rank in (0, 1)] == [False, False]
