"""The real vLLM, its CPU build, on a tiny model: what it draws, what it says of it, and what a refit changes.

One engine serves the whole file, in order: a test may leave other weights behind, and the last kills it.
"""

from __future__ import annotations

import threading
import time

import psutil
import pytest
import torch

from grpo_recipes.generation.contract import GeneratorDied, Request, Sampling, generate
from grpo_recipes.generation.sync.safetensors_folder import PLAN, RefitError, write_folder
from grpo_recipes.generation.vllm.arguments import engine_setup
from grpo_recipes.generation.vllm.backend import VllmGenerator
from policy_models import (
    VOCAB,
    policy_config,
    policy_gradient_loss,
    random_batch,
    weights_of,
    write_llama,
)

TEMPERATURE = 0.7
TOLERANCE = 1e-4  # natural log; float32 against float64
LENGTH = 128
# Longer than a block of the cache (32 tokens), so that a prefix can be kept.
PROMPT = tuple(torch.randint(2, VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist())
SIZES = {"head_dim": 32, "max_position_embeddings": LENGTH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder, **SIZES)
    return folder


@pytest.fixture(scope="module")
def policy(folder):
    generation = {"max_new_tokens": 8, "temperature": TEMPERATURE, "max_batch_size": 64}
    cfg = {"block_size": 32}
    return policy_config(
        folder, max_total_sequence_length=LENGTH, generation=generation | {"backend": "vllm", "vllm_cfg": cfg}
    )


@pytest.fixture(scope="module")
def generator(folder, policy):
    setup = engine_setup(policy, folder, on_gpu=False, threads=1)
    with VllmGenerator(setup, max_positions=LENGTH, time_limit_s=600) as generator:
        yield generator


@pytest.fixture(scope="module")
def trainer(folder, policy):
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    return MegatronPolicy(
        policy, temperature=TEMPERATURE, total_optimizer_steps=10, model_folder=folder, needs_reference=False, seed=0
    )


def requests(count, *, prompt=PROMPT, temperature=TEMPERATURE, tokens=8, stop=(VOCAB + 1,), first=0, seed=0):
    sampling = Sampling(temperature, tokens, stop)
    return [Request(first + n, prompt, 2**62 + seed + n, sampling) for n in range(count)]


def model_of(folder, weights=None):
    """transformers' model in float64; with other weights where given."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if weights is not None:
        model.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
    return model


@torch.no_grad()
def logits(model, prompt, completion):
    """[R, V], before each token of the completion."""
    ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
    return model(ids[None]).logits[0, len(prompt) - 1 : -1]


def gap(model, found, temperature=TEMPERATURE):
    """Largest difference of the sampler's logprobs from the model's."""
    gaps = []
    for completion in found:
        logp = (logits(model, PROMPT, completion) / temperature).log_softmax(-1)
        wanted = logp.gather(1, completion.token_ids[:, None])[:, 0]
        gaps.append(float((wanted - completion.logprobs).abs().max()))
    return max(gaps)


def test_logprobs_are_of_the_drawn_tokens_at_the_temperature(generator, folder):
    """Covers: temperature missing from a logprob; the recorded logprob is raw, or of another token."""
    found = generate(generator, requests(8))
    assert gap(model_of(folder), found) < TOLERANCE
    assert gap(model_of(folder), found, temperature=1.0) > 100 * TOLERANCE  # the test can fail
    assert all(c.weight_versions.tolist() == [0] * 8 and c.finish_reason == "length" for c in found)


def test_greedy_takes_the_most_likely_token_and_says_its_logprob_at_temperature_1(generator, folder):
    [found] = generate(generator, requests(1, temperature=0.0))
    model = model_of(folder)
    assert found.token_ids.tolist() == logits(model, PROMPT, found).argmax(-1).tolist()
    assert gap(model, [found], temperature=1.0) < TOLERANCE


def test_a_seed_decides_its_sample_whatever_else_is_drawn(generator):
    """Covers: every replica samples the same completions, or the seed never reaches the sampler."""
    found = [c.token_ids.tolist() for c in generate(generator, requests(16))]
    assert len({tuple(tokens) for tokens in found}) > 8
    again = requests(16)
    mixed = [*again[:8], *requests(3, first=100, temperature=0.0), *again[8:]]
    assert [c.token_ids.tolist() for c in generate(generator, mixed) if c.request_id < 100] == found
    assert [c.token_ids.tolist() for c in generate(generator, requests(1))] == found[:1]


def test_a_stop_token_ends_a_sample_and_is_its_last(generator, folder):
    [found] = generate(generator, requests(1, tokens=60))
    stop = found.token_ids.tolist()[3]
    first = found.token_ids.tolist().index(stop)
    [stopped] = generate(generator, requests(1, tokens=60, stop=(stop,)))
    assert stopped.token_ids.tolist() == found.token_ids.tolist()[: first + 1]
    assert stopped.finish_reason == "stop" and found.finish_reason == "length" and len(found.token_ids) == 60
    # The model's own end-of-sequence token is one like another unless it is asked for.
    many = generate(generator, requests(64, tokens=20))
    assert any(1 in c.token_ids.tolist()[:-1] for c in many)


def test_requests_that_cannot_be_served_are_refused(generator):
    with pytest.raises(ValueError, match="at most 128"):
        generator.submit(requests(1, tokens=LENGTH))
    with pytest.raises(ValueError, match="must differ"):
        generator.submit(requests(1) * 2)


def test_two_refits_bring_the_trainers_weights_and_forget_the_prefixes(generator, trainer, folder):
    """Covers: stale prefix cache after refit; the second refit corrupts weights."""
    batch = random_batch(4)
    before = model_of(folder)
    for version in (1, 2):
        trainer.train([batch], policy_gradient_loss)
        generator.update_weights(trainer.weight_plan(), trainer.weight_buckets(), version)
        found = generate(generator, requests(8))
        after = model_of(folder, weights_of(trainer))
        assert gap(after, found) < TOLERANCE
        assert gap(before, found) > 100 * TOLERANCE  # the step was not trivial
        assert all(c.weight_versions.tolist() == [version] * 8 for c in found)
        before = after


def test_the_trainer_computes_the_same_logprobs(generator, trainer):
    from grpo_recipes.engine.batch import Sample, make_batch

    generator.update_weights(trainer.weight_plan(), trainer.weight_buckets(), 3)
    samples = [Sample(PROMPT, c.token_ids, c.logprobs, 1.0) for c in generate(generator, requests(8))]
    batch = make_batch(samples, [list(range(8))], token_level=True)
    [logprobs] = trainer.logprobs([batch])
    assert float((logprobs - batch.sampler_logprobs)[batch.mask].abs().max()) < TOLERANCE


def test_unfinished_samples_go_on_by_new_weights_and_say_so_token_by_token(generator, trainer, folder):
    generator.update_weights(trainer.weight_plan(), trainer.weight_buckets(), 3)
    old = model_of(folder, weights_of(trainer))
    generator.submit(requests(64, tokens=80))
    time.sleep(0.3)
    generator.pause()
    assert len(list(generator.completions())) < 64
    trainer.train([random_batch(4, seed=1)], policy_gradient_loss)
    generator.update_weights(trainer.weight_plan(), trainer.weight_buckets(), 4)
    generator.resume(4)
    found = [c for c in generator.completions() if 3 in c.weight_versions.tolist()]
    new = model_of(folder, weights_of(trainer))
    assert len(found) > 1
    for completion in found:
        versions = completion.weight_versions
        assert versions.tolist() == sorted(versions.tolist())
        for version, model in ((3, old), (4, new)):
            logp = (logits(model, PROMPT, completion) / TEMPERATURE).log_softmax(-1)
            wanted = logp.gather(1, completion.token_ids[:, None])[:, 0]
            there = versions == version
            assert there.any() and float((wanted - completion.logprobs)[there].abs().max()) < TOLERANCE


def test_weights_that_do_not_arrive_whole_are_named(generator, trainer, tmp_path):
    """Covers: a failing refit only prints and the trainer hangs."""
    plan = trainer.weight_plan()
    name = "model.layers.1.mlp.down_proj.weight"
    buckets = ({n: t for n, t in bucket.items() if n != name} for bucket in trainer.weight_buckets())
    began = time.monotonic()
    with pytest.raises(RefitError, match=f"{name} is missing"):
        generator.update_weights(plan, buckets, 5)
    assert time.monotonic() - began < 30
    write_folder(tmp_path, plan, trainer.weight_buckets())
    (tmp_path / PLAN).unlink()
    with pytest.raises(RefitError, match="incomplete"):
        generator.load_folder(tmp_path, 5)
    generate(generator, requests(1))  # it goes on


def test_aborted_samples_never_arrive_and_others_do(generator):
    generator.submit(requests(4, tokens=80, first=100))
    generator.abort([100, 102, 999])
    found = []
    while more := generator.poll(60.0):
        found += more
    assert sorted((c.request_id, len(c.token_ids)) for c in found) == [(101, 80), (103, 80)]
    generator.submit(requests(1, tokens=2, first=100))  # the id is free again
    [again] = generator.poll(60.0)
    assert again.request_id == 100 and generator.poll(60.0) == []


def test_sleep_and_wake(generator):
    wanted = [c.token_ids.tolist() for c in generate(generator, requests(2))]
    generator.sleep()
    generator.wake()
    assert [c.token_ids.tolist() for c in generate(generator, requests(2))] == wanted


def test_the_field_snapshot_is_of_the_installed_vllm():
    import json

    from grpo_recipes.generation.vllm.field_snapshot import snapshot
    from grpo_recipes.recipe.vllm import FIELDS_FILE

    assert json.loads(FIELDS_FILE.read_text()) == json.loads(json.dumps(snapshot()))


def test_an_engine_that_dies_while_it_is_called_is_one_clear_error_within_seconds(generator):
    process = psutil.Process(generator._process.pid)
    [core] = [child for child in process.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
    core.suspend()
    threading.Timer(1.0, core.kill).start()
    began = time.monotonic()
    with pytest.raises(GeneratorDied, match="the vLLM engine is gone: EngineDeadError"):
        generator.pause()
    assert time.monotonic() - began < 20
    with pytest.raises(GeneratorDied):
        generator.submit(requests(1))
    _, alive = psutil.wait_procs([process, core], timeout=5)
    assert alive == []
