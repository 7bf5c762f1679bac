"""What the engine asks of a trainer (policy.contract.Policy), on one process, for both trainers."""

import json
import math
import shutil

import pytest
import torch

from grpo_recipes.errors import UserError
from grpo_recipes.policy.contract import LossOutputs, empty_batch
from policy_models import (
    LLAMA3_ROPE,
    gradients,
    make_policy,
    policy_gradient_loss,
    random_batch,
    reference_gradients,
    reference_outputs,
    weights_of,
    write_llama,
    write_model,
)

pytestmark = pytest.mark.timeout(120)

SHAPES = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "every head its own": {"num_key_value_heads": 4},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "wide heads, odd vocabulary": {"head_dim": 32, "vocab_size": 17},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, write_llama(folder)


@pytest.fixture(params=["megatron", "dtensor"])
def make(request):
    """make(folder, ...) builds the trainer."""

    def build(folder, **arguments):
        return make_policy(request.param, folder, **arguments)

    return build


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logprobs_and_gradients_equal_transformers(make, shape, tmp_path):
    """Covers: a logprob that belongs to another token; temperature missing from one of the logprobs or entropy."""
    model = write_llama(tmp_path, **shape)
    policy = make(tmp_path, temperature=0.7)
    batch = random_batch(12)
    (found,) = policy.logprobs([batch])
    with torch.no_grad():
        wanted, _ = reference_outputs(model.double(), batch, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
    starts = batch.lengths.cumsum(0) - batch.lengths
    assert not found[starts].any()

    exact = reference_gradients(model, batch, 0.7)
    if model.config.tie_word_embeddings:
        exact.pop("lm_head.weight", None)
    mine = gradients(policy, [batch])
    assert mine.keys() == exact.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(
            mine[name].double(), gradient, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("parts", [2, 5])
def test_splitting_the_batch_changes_nothing(make, parts, llama):
    """Covers: loss averaged per microbatch, so that splitting a batch changes the gradient; a rank with fewer
    microbatches than others (the last part is an empty one)."""
    policy = make(llama[0])
    batch = random_batch(13)
    pieces = [batch.select(range(part, 13, parts)) for part in range(parts)]
    whole, split = gradients(policy, [batch]), gradients(policy, [*pieces, empty_batch()])
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], atol=1e-6, rtol=0)
    one = make(llama[0]).train([batch], policy_gradient_loss)
    many = make(llama[0]).train([*pieces, empty_batch()], policy_gradient_loss)
    assert many.loss == pytest.approx(one.loss, abs=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, abs=1e-5)
    assert many.sums == pytest.approx(one.sums, rel=1e-5)
    assert many.maxima == pytest.approx(one.maxima, rel=1e-5)


def test_statistics_of_a_step(make, llama):
    folder, model = llama
    batch = random_batch(6)
    stats = make(folder, max_grad_norm=1e-3).train([batch], policy_gradient_loss)
    exact = reference_gradients(model, batch, 1.0)
    norm = math.sqrt(sum(float(g.square().sum()) for g in exact.values()))
    logprobs, entropy = reference_outputs(model, batch, 1.0)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)  # before clipping
    assert stats.sums["tokens"] == float(batch.mask.sum())
    assert stats.sums["entropy"] == pytest.approx(float((entropy.detach() * batch.mask).sum()), rel=1e-5)
    assert stats.maxima["largest"] == pytest.approx(float(logprobs.abs().max()), rel=1e-5)
    assert stats.learning_rate == 1e-2
    assert not stats.skipped


def test_steps_equal_adamw(make, llama):
    """Three clipped AdamW steps in float64; norms are not decayed."""
    folder, model = llama
    model = model.double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = make(folder, max_grad_norm=0.05)
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
    )
    for step in range(3):
        batch = random_batch(6, seed=step)
        policy.train([batch], policy_gradient_loss)
        reference_gradients(model, batch, 1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    after = weights_of(policy)
    for name, wanted in model.named_parameters():
        # Adam divides by a gradient's own size: where that is near zero, rounding is magnified.
        assert (after[name].double() - wanted).abs().mean() < 2e-6, name
        with torch.no_grad():
            wanted.copy_(before[name])


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        ({}, [1e-2] * 6),
        ({"lr_warmup_iters": 3}, [0, 1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2, 1e-2]),
        ({"lr_warmup_iters": 2, "lr_warmup_init": 4e-3}, [4e-3, 7e-3, 1e-2, 1e-2, 1e-2, 1e-2]),
        ({"lr_decay_style": "linear"}, [1e-2, 9e-3, 8e-3, 7e-3, 6e-3, 5e-3]),
        (
            {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "lr_decay_iters": 6},
            [0, 5e-3, *(1e-2 * (1 + math.cos(math.pi * x / 4)) / 2 for x in range(4))],
        ),
    ],
    ids=["constant", "warm-up", "warm-up from a rate", "linear", "cosine"],
)
def test_learning_rate_against_its_closed_form(make, scheduler, rates, llama):
    """Covers: a scheduler that counts microbatches, or subtracts warm-up twice. Two microbatches a step here."""
    policy = make(llama[0], steps=10, optimizer={"lr": 1e-2}, scheduler=scheduler)
    batch = random_batch(4)
    halves = [batch.select([0, 1]), batch.select([2, 3])]
    used = [policy.train(halves, policy_gradient_loss).learning_rate for _ in rates]
    assert used == pytest.approx(rates, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped(make, poison, llama, tmp_path):
    policy = make(llama[0], steps=10, optimizer={"lr": 1e-2}, scheduler={"lr_decay_style": "linear"})
    twin = make(llama[0], steps=10, optimizer={"lr": 1e-2}, scheduler={"lr_decay_style": "linear"})
    good, bad = random_batch(5), random_batch(5, seed=1)

    def broken(inputs):
        outputs = policy_gradient_loss(inputs)
        if poison == "loss":
            return LossOutputs(outputs.loss + math.nan, outputs.sums, outputs.maxima)
        # finite, with an infinite slope
        return LossOutputs(
            (inputs.logprobs - inputs.logprobs.detach()).abs().sqrt().sum(), outputs.sums, outputs.maxima
        )

    policy.train([good], policy_gradient_loss)
    before, rate = weights_of(policy), policy.learning_rate
    stats = policy.train([bad], broken)
    assert stats.skipped
    assert math.isnan(stats.loss) if poison == "loss" else not math.isfinite(stats.grad_norm)
    assert policy.learning_rate == rate
    assert all(torch.equal(before[n], w) for n, w in weights_of(policy).items())
    assert not policy.train([good], policy_gradient_loss).skipped

    for _ in range(2):
        twin.train([good], policy_gradient_loss)
    assert all(torch.equal(weights_of(twin)[n], w) for n, w in weights_of(policy).items())


def test_current_and_old_logprobs_of_the_same_weights_are_the_same_bits(make, llama):
    policy = make(llama[0])
    batch = random_batch(7)
    (old,) = policy.logprobs([batch])
    seen = []

    def watch(inputs):
        seen.append(inputs.logprobs.detach().clone())
        return policy_gradient_loss(inputs)

    policy.train([batch], watch)
    assert torch.equal(seen[0], old)
    assert not torch.equal(policy.logprobs([batch])[0], old)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_reference_stays_what_the_run_started_from(precision, make, llama):
    policy = make(llama[0], precision=precision, needs_reference=True)
    batches = [random_batch(4), random_batch(3, seed=2)]
    first = policy.logprobs(batches)
    for _ in range(2):
        policy.train(batches, policy_gradient_loss)
    trained, now = weights_of(policy), policy.logprobs(batches)
    assert all(torch.equal(a, b) for a, b in zip(policy.reference_logprobs(batches), first, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(policy.logprobs(batches), now, strict=True))
    assert all(torch.equal(trained[n], w) for n, w in weights_of(policy).items())
    assert not torch.equal(policy.logprobs(batches)[0], first[0])


def test_training_repeats_bit_for_bit(make, llama):
    runs = []
    for _ in range(2):
        policy = make(llama[0])
        stats = [policy.train([random_batch(9, seed=s)], policy_gradient_loss) for s in range(3)]
        runs.append((stats, weights_of(policy)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][n], w) for n, w in runs[1][1].items())


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_export_is_what_transformers_reads(make, shape, tmp_path):
    """Covers: conversion between stages that breaks a chain of runs."""
    from transformers import AutoModelForCausalLM

    write_llama(tmp_path / "in", **shape)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    policy = make(tmp_path / "in")
    batch = random_batch(5)
    policy.train([batch], policy_gradient_loss)
    (tmp_path / "out").mkdir()
    policy.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        wanted, _ = reference_outputs(model, batch, 1.0)
    torch.testing.assert_close(policy.logprobs([batch])[0], wanted, atol=1e-5, rtol=0)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    again = weights_of(make(tmp_path / "out"))
    assert all(torch.equal(again[n], w) for n, w in weights_of(policy).items())


def test_weight_plan_names_what_the_buckets_hold(make, llama):
    folder, model = llama
    policy = make(folder)
    plan = policy.weight_plan()
    assert {spec.name: spec.shape for spec in plan} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    buckets = list(policy.weight_buckets())
    assert [name for bucket in buckets for name in bucket] == [spec.name for spec in plan]
    assert all(spec.owner == (0,) and spec.dtype == torch.float32 for spec in plan)


def test_bfloat16_is_close(make, llama):
    folder, model = llama
    policy = make(folder, precision="bfloat16")
    batch = random_batch(6)
    with torch.no_grad():
        wanted, _ = reference_outputs(model.double(), batch, 1.0)
    assert (policy.logprobs([batch])[0] - wanted).abs().mean() < 0.03
    stats = [policy.train([batch], policy_gradient_loss) for _ in range(3)]
    assert stats[2].loss < stats[0].loss
    assert policy.describe()["dtype"] == "bfloat16"


def test_random_initial_weights_do_not_need_any_file(make, tmp_path):
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    one, two = (weights_of(make(tmp_path, initial_weights="random", init_seed=4)) for _ in range(2))
    assert all(torch.equal(one[n], w) for n, w in two.items())
    other = weights_of(make(tmp_path, initial_weights="random", init_seed=5))
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_full_recomputation_changes_nothing(make, llama):
    batch = random_batch(5)
    plain = gradients(make(llama[0]), [batch])
    again = gradients(make(llama[0], cfg={"activation_checkpointing": True}), [batch])
    assert all(torch.equal(plain[n], g) for n, g in again.items())


def test_tensors_that_the_model_has_no_place_for(make, llama, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(llama[0], tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError, match=r"q_proj\.bias"):
        make(tmp_path / "m")
    save_file({n: t for n, t in tensors.items() if "o_proj" not in n}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError, match=r"o_proj\.weight is missing"):
        make(tmp_path / "m")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_every_family(make, family, tmp_path):
    """Logprobs, gradients and published names."""
    model = write_model(family, tmp_path)
    policy = make(tmp_path, temperature=0.7)
    batch = random_batch(8)
    with torch.no_grad():
        wanted, _ = reference_outputs(model.double(), batch, 0.7)
    torch.testing.assert_close(policy.logprobs([batch])[0].double(), wanted, atol=1e-5, rtol=0)
    exact = reference_gradients(model, batch, 0.7)
    mine = gradients(policy, [batch])
    assert mine.keys() == exact.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(
            mine[name].double(), gradient, atol=5e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_resumed_training_is_the_same_bit_for_bit(make, llama, tmp_path):
    """Covers: loss differs after a restore; fresh Adam silently. The first state is written in the background."""
    policy = make(llama[0], scheduler={"lr_decay_style": "linear"})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    batches = [random_batch(5, seed=seed) for seed in range(4)]
    policy.train([batches[0]], policy_gradient_loss)
    policy.start_save(tmp_path / "one")
    first = policy.train([batches[1]], policy_gradient_loss)  # does not disturb what is being written
    assert policy.finish_save(wait=True)
    digests = policy.save(tmp_path / "two")
    assert {path.name for path in (tmp_path / "two").iterdir()} == digests.keys()
    rest = [policy.train([batch], policy_gradient_loss) for batch in batches[2:]]

    again = make(llama[0], scheduler={"lr_decay_style": "linear"}, initial_weights="random")
    again.load(tmp_path / "one")
    assert again.train([batches[1]], policy_gradient_loss) == first
    again.load(tmp_path / "two")
    assert [again.train([batch], policy_gradient_loss) for batch in batches[2:]] == rest
    assert all(torch.equal(weights_of(policy)[n], w) for n, w in weights_of(again).items())


def test_a_checkpoint_that_lacks_something_is_refused(make, llama, tmp_path):
    policy = make(llama[0])
    policy.train([random_batch(4)], policy_gradient_loss)
    for name in ("whole", "empty"):
        (tmp_path / name).mkdir()
    policy.save(tmp_path / "whole")
    with pytest.raises(UserError):
        make(llama[0]).load(tmp_path / "empty")
    write_llama(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(UserError, match="another model"):
        make(tmp_path / "other").load(tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        if path.suffix in (".safetensors", ".distcp"):
            path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError):
        make(llama[0]).load(tmp_path / "whole")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_memory_that_goes_away_comes_back_without_a_trace(make, precision, llama):
    results = []
    for parts in ((), ("optimizer", "weights", "optimizer")):
        policy = make(llama[0], precision=precision)
        stats = []
        for seed in range(3):
            for part in parts:
                policy.offload(part)
            stats.append(policy.train([random_batch(6, seed=seed)], policy_gradient_loss))
        for part in parts:
            policy.offload(part)
        results.append((stats, weights_of(policy), policy.logprobs([random_batch(4)])[0]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][n], w) for n, w in results[1][1].items())
    assert torch.equal(results[0][2], results[1][2])
