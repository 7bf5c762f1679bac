"""What the DTensor trainer has for itself; what it shares with Megatron's is in test_policy_contract.py."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from grpo_recipes.errors import UserError
from grpo_recipes.policy.dtensor.decode import WholeModel
from grpo_recipes.policy.dtensor.schedule import Schedule
from grpo_recipes.recipe.megatron import scheduler_arguments
from grpo_recipes.recipe.schema import MegatronConfig
from policy_models import (
    gradients,
    make_policy,
    policy_config,
    policy_gradient_loss,
    random_batch,
    weights_of,
    write_model,
)

pytestmark = pytest.mark.timeout(120)

SCHEDULES = {
    "constant": {},
    "warm-up": {"lr_warmup_iters": 4, "lr_warmup_init": 1e-4},
    "linear": {"lr_decay_style": "linear", "lr_warmup_iters": 2},
    "cosine, shorter than the run": {"lr_decay_style": "cosine", "lr_decay_iters": 8},
    "inverse square root": {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 3},
    **{
        f"WSD {shape}": {
            "lr_decay_style": "WSD",
            "lr_wsd_decay_style": shape,
            "lr_wsd_decay_iters": 5,
            "lr_warmup_iters": 2,
        }
        for shape in ("linear", "cosine", "exponential", "minus_sqrt")
    },
    "rising weight decay": {
        "start_weight_decay": 0.01,
        "end_weight_decay": 0.2,
        "weight_decay_incr_style": "cosine",
    },
    "linearly rising weight decay": {
        "start_weight_decay": 0.01,
        "end_weight_decay": 0.2,
        "weight_decay_incr_style": "linear",
    },
}


@pytest.mark.parametrize("scheduler", SCHEDULES.values(), ids=SCHEDULES)
def test_rates_are_those_of_megatrons_scheduler(scheduler):
    """Covers: a scheduler whose curve differs between backends."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = {"lr": 1e-3, "min_lr": 2e-5, "weight_decay": 0.1}
    arguments = scheduler_arguments(MegatronConfig(optimizer=optimizer, scheduler=scheduler), 12)
    schedule, groups = Schedule(**arguments), [{"lr": 0.0, "weight_decay": 0.0}]
    theirs = OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **arguments)
    for step in range(16):
        assert schedule.learning_rate(step) == pytest.approx(groups[0]["lr"], rel=1e-12)
        assert schedule.weight_decay(step) == pytest.approx(groups[0]["weight_decay"], rel=1e-12)
        theirs.step(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    write_model("qwen3", folder)
    return folder


def test_weights_in_host_memory_change_nothing(folder):
    batches = [random_batch(6, seed=seed) for seed in range(3)]
    found = []
    for cfg in ({}, {"cpu_offload": True}):
        policy = make_policy("dtensor", folder, cfg)
        found.append(([policy.train([batch], policy_gradient_loss) for batch in batches], weights_of(policy)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][n], w) for n, w in found[1][1].items())


@pytest.mark.timeout(400)
def test_compiled_layers_compute_the_same_and_are_compiled_once(folder):
    """Batches of other lengths compile nothing anew; recomputation runs the compiled layers."""
    from torch._dynamo.utils import counters

    plain = make_policy("dtensor", folder)
    compiled = make_policy("dtensor", folder, {"torch_compile": True, "activation_checkpointing": True})
    graphs = []
    for seed in range(3):
        batch = random_batch(5 + seed, seed=seed)
        wanted, found = gradients(plain, [batch]), gradients(compiled, [batch])
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(compiled.logprobs([batch])[0], plain.logprobs([batch])[0], atol=2e-5, rtol=0)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] > 0


def test_decoding_gives_the_logits_of_transformers(tmp_path):
    """Left-padded prompts, then tokens one by one, rows dropped and doubled in between."""
    model = write_model("llama", tmp_path)
    whole = WholeModel(policy_config(tmp_path), tmp_path, "cpu")
    whole.take({name: p.detach() for name, p in model.named_parameters()})
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 17, (n,), generator=draw) for n in (3, 7, 5)]
    width = max(map(len, rows))
    padded = torch.stack([torch.cat((torch.zeros(width - len(row), dtype=torch.int64), row)) for row in rows])
    decoder = whole.decoder(max_batch_size=3, max_sequence_length=20)
    logits = decoder.prefill(padded, torch.tensor([width - len(row) for row in rows]))
    for step in range(4):
        wanted = torch.stack([model(row[None]).logits[0, -1] for row in rows])
        torch.testing.assert_close(logits, wanted.detach(), atol=1e-4, rtol=1e-5)
        if step == 1:
            decoder.select(torch.tensor([2, 0, 2]))
            rows = [rows[2], rows[0], rows[2]]
        drawn = torch.randint(0, 17, (len(rows),), generator=draw)
        rows = [torch.cat((row, token[None])) for row, token in zip(rows, drawn, strict=True)]
        logits = decoder.step(drawn)


def test_an_index_that_names_other_code_is_not_unpickled(folder, tmp_path):
    policy = make_policy("dtensor", folder)
    policy.save(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(pytest.importorskip))
    with pytest.raises(UserError, match="importorskip"):
        policy.load(tmp_path)


def test_more_ranks_than_there_are_processes(folder):
    with pytest.raises(UserError, match="does not divide 1 process"):
        make_policy("dtensor", folder, {"context_parallel_size": 2})
