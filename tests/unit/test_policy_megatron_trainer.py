import json
import math
import shutil

import pytest
import torch

from grpo_recipes.errors import UserError
from grpo_recipes.policy.contract import LossOutputs, empty_batch
from grpo_recipes.policy.megatron.trainer import MegatronPolicy
from policy_models import (
    LLAMA3_ROPE,
    gradients,
    policy_config,
    policy_gradient_loss,
    random_batch,
    reference_gradients,
    reference_outputs,
    weights_of,
    write_llama,
)

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


def make(folder, *, temperature=1.0, steps=20, needs_reference=False, **changes):
    return MegatronPolicy(policy_config(folder, **changes), temperature, steps, folder, needs_reference=needs_reference)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logprobs_and_gradients_equal_transformers(shape, tmp_path):
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
def test_splitting_the_batch_changes_nothing(parts, llama):
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


def test_statistics_of_a_step(llama):
    folder, model = llama
    batch = random_batch(6)
    stats = make(folder, max_grad_norm=1e-3).train([batch], policy_gradient_loss)
    exact = reference_gradients(model, batch, 1.0)
    norm = math.sqrt(sum(float(g.square().sum()) for g in exact.values()))
    logprobs, entropy = reference_outputs(model, batch, 1.0)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)  # before clipping
    assert stats.sums["tokens"] == float(batch.mask.sum())
    assert stats.sums["entropy"] == pytest.approx(float((entropy * batch.mask).sum()), rel=1e-5)
    assert stats.maxima["largest"] == pytest.approx(float(logprobs.abs().max()), rel=1e-5)
    assert stats.learning_rate == 1e-2
    assert not stats.skipped


def test_steps_equal_adamw(llama):
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
def test_learning_rate_against_its_closed_form(scheduler, rates, llama):
    """Covers: a scheduler that counts microbatches, or subtracts warm-up twice. Two microbatches a step here."""
    cfg = {"optimizer": {"lr": 1e-2}, "scheduler": scheduler}
    policy = make(llama[0], steps=10, megatron_cfg=cfg)
    batch = random_batch(4)
    halves = [batch.select([0, 1]), batch.select([2, 3])]
    used = [policy.train(halves, policy_gradient_loss).learning_rate for _ in rates]
    assert used == pytest.approx(rates, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped(poison, llama, tmp_path):
    policy = make(
        llama[0], steps=10, megatron_cfg={"optimizer": {"lr": 1e-2}, "scheduler": {"lr_decay_style": "linear"}}
    )
    twin = make(llama[0], steps=10, megatron_cfg={"optimizer": {"lr": 1e-2}, "scheduler": {"lr_decay_style": "linear"}})
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


def test_current_and_old_logprobs_of_the_same_weights_are_the_same_bits(llama):
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


def test_reference_stays_what_the_run_started_from(llama):
    policy = make(llama[0], needs_reference=True)
    batches = [random_batch(4), random_batch(3, seed=2)]
    first = policy.logprobs(batches)
    for _ in range(2):
        policy.train(batches, policy_gradient_loss)
    trained = weights_of(policy)
    assert all(torch.equal(a, b) for a, b in zip(policy.reference_logprobs(batches), first, strict=True))
    assert all(torch.equal(trained[n], w) for n, w in weights_of(policy).items())
    assert not torch.equal(policy.logprobs(batches)[0], first[0])


def test_training_repeats_bit_for_bit(llama):
    runs = []
    for _ in range(2):
        policy = make(llama[0])
        stats = [policy.train([random_batch(9, seed=s)], policy_gradient_loss) for s in range(3)]
        runs.append((stats, weights_of(policy)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][n], w) for n, w in runs[1][1].items())


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_export_is_what_transformers_reads(shape, tmp_path):
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


def test_weight_plan_names_what_the_buckets_hold(llama):
    folder, model = llama
    policy = make(folder)
    plan = policy.weight_plan()
    assert {spec.name: spec.shape for spec in plan} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    buckets = list(policy.weight_buckets())
    assert [name for bucket in buckets for name in bucket] == [spec.name for spec in plan]
    assert all(spec.owner == (0,) and spec.dtype == torch.float32 for spec in plan)


def test_bfloat16_is_close(llama):
    folder, model = llama
    policy = make(folder, precision="bfloat16")
    batch = random_batch(6)
    with torch.no_grad():
        wanted, _ = reference_outputs(model.double(), batch, 1.0)
    assert (policy.logprobs([batch])[0] - wanted).abs().mean() < 0.03
    stats = [policy.train([batch], policy_gradient_loss) for _ in range(3)]
    assert stats[2].loss < stats[0].loss
    assert policy.describe()["dtype"] == "bfloat16"


def test_random_initial_weights_do_not_need_any_file(tmp_path):
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    one, two = (weights_of(make(tmp_path, initial_weights="random", init_seed=4)) for _ in range(2))
    assert all(torch.equal(one[n], w) for n, w in two.items())
    other = weights_of(make(tmp_path, initial_weights="random", init_seed=5))
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_full_recomputation_changes_nothing(llama):
    batch = random_batch(5)
    plain = gradients(make(llama[0]), [batch])
    cfg = {"optimizer": {"lr": 1e-2}, "activation_checkpointing": True}
    again = gradients(make(llama[0], megatron_cfg=cfg), [batch])
    assert all(torch.equal(plain[n], g) for n, g in again.items())


def test_what_the_recipe_sets_reaches_megatron(llama):
    cfg = {
        "optimizer": {"lr": 3e-4, "adam_beta2": 0.95},
        "distributed_data_parallel_config": {"check_for_large_grads": True},
        "activation_checkpointing": False,
        "recompute_granularity": "selective",
    }
    policy = make(llama[0], megatron_cfg=cfg)
    assert policy.optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert policy.model[0].ddp_config.check_for_large_grads
    assert policy.built.config.recompute_granularity == "selective"


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"context_parallel_size": 2}, "does not divide 1 process"),
        ({"tensor_model_parallel_size": 2}, "does not divide 1 process"),
        ({"optimizer": {"lr": 1e-3, "use_distributed_optimizer": False}}, "use_distributed_optimizer"),
        ({"recompute_granularity": "nonsense"}, "policy.megatron_cfg"),
    ],
)
def test_settings_that_cannot_work(cfg, message, llama):
    with pytest.raises(UserError, match=message):
        make(llama[0], megatron_cfg={"optimizer": {"lr": 1e-3}} | cfg)


def test_tensors_that_the_model_has_no_place_for(llama, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(llama[0], tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError, match=r"q_proj\.bias"):
        make(tmp_path / "m")
    save_file({n: t for n, t in tensors.items() if "o_proj" not in n}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError, match=r"o_proj\.weight is missing"):
        make(tmp_path / "m")
