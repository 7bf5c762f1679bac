"""Refits of the real vLLM by every transport, with the certificate, and the faults that it must catch.

One engine serves the whole file, in order; the last test leaves it without weights.
"""

from __future__ import annotations

import time

import pytest

from grpo_recipes.cluster.inline import InlineGroup
from grpo_recipes.engine.refit import EngineRefit
from grpo_recipes.generation.sync.contract import RefitError
from grpo_recipes.generation.vllm.arguments import engine_setup
from grpo_recipes.generation.vllm.backend import VllmGenerator
from grpo_recipes.proof.refit_certificate.worker import RefitWorker, twins
from policy_models import VOCAB, policy_config, write_llama

LENGTH = 128
TENSORS = 21
EMBEDDING = "model.embed_tokens.weight"


class Trainer(RefitWorker):
    """With two more faults than a certificate can plant."""

    def outgoing_buckets(self):
        for bucket in super().outgoing_buckets():
            if self.plant == "element" and EMBEDDING in bucket:
                bucket[EMBEDDING] = bucket[EMBEDDING].clone()
                bucket[EMBEDDING][-1, -1] += 1e-3
            yield bucket

    def probe_logprobs(self, sequences):
        if self.plant == "probe":  # as if the two models computed something different
            self.step()
        return super().probe_logprobs(sequences)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder, head_dim=32, max_position_embeddings=LENGTH)
    return folder


@pytest.fixture(scope="module")
def policy(folder):
    generation = {"max_new_tokens": 8, "temperature": 0.7, "max_batch_size": 64, "backend": "vllm"}
    return policy_config(
        folder, max_total_sequence_length=LENGTH, generation=generation | {"vllm_cfg": {"block_size": 32}}
    )


@pytest.fixture(scope="module")
def worker(folder, policy):
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    trainer = MegatronPolicy(
        policy, temperature=0.7, total_optimizer_steps=20, model_folder=folder, needs_reference=False, seed=0
    )
    return Trainer(trainer)


@pytest.fixture(scope="module")
def generator(folder, policy):
    setup = engine_setup(policy, folder, on_gpu=False, threads=1)
    with VllmGenerator(setup, max_positions=LENGTH, time_limit_s=600) as generator:
        yield generator


@pytest.fixture
def make_refit(worker, generator):
    worker.plant = None
    group = InlineGroup(lambda placement: worker)

    def make(transport="ipc", certify="first_two"):
        return EngineRefit(
            group,
            lambda: [generator],
            transport=transport,
            certify=certify,
            precision="float32",
            vocab_size=VOCAB,
            longest=LENGTH,
        )

    return make


def step(worker):
    assert len(worker.step()) == TENSORS  # not trivial: every tensor moves


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "safetensors"])
def test_the_first_two_refits_are_certified_and_the_third_is_not(make_refit, worker, transport):
    """Covers: the second refit corrupts weights."""
    refit = make_refit(transport)
    size = sum(t.nbytes for b in worker.policy.weight_buckets() for t in b.values())
    for version, certified in ((1, True), (2, True), (3, False)):
        step(worker)
        stats = refit(version)
        assert stats.certified is certified and stats.bytes == size and stats.tensors == TENSORS and stats.seconds > 0
        if certified:
            assert 0 < stats.largest_gap < 1e-4
            # What vLLM's CPU build packs; all else was looked at where it lives.
            assert set(stats.unseen) == {n for n in stats.unseen if n.endswith("_proj.weight") or n == "lm_head.weight"}


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "safetensors"])
@pytest.mark.parametrize(
    ("plant", "named"),
    [
        ("old_weights", [f"{EMBEDDING} differs", "and 16 more"]),
        ("swapped_tensors", ["{0} differs", "{1} differs"]),
        ("swapped_rows", ["{0} differs"]),
        ("second_refit", ["lm_head.weight differs"]),
        ("element", [f"{EMBEDDING} differs"]),
    ],
)
def test_wrong_weights_are_found_and_named(make_refit, worker, transport, plant, named):
    """Covers: stale or corrupt weights after a refit, which nothing else shows but a falling reward."""
    refit = make_refit(transport)
    step(worker)
    refit(4)
    worker._steps = 1
    step(worker)
    worker.plant = plant  # in the second refit
    with pytest.raises(RefitError, match="refit 5") as raised:
        refit(5)
    both = twins(worker.policy.weight_plan())
    assert all(words.format(*both) in str(raised.value) for words in named)
    assert (str(raised.value).count(" differs (")) == (5 if plant == "old_weights" else len(named))


def test_without_a_certificate_nothing_is_seen(make_refit, worker):
    """So the tests above can fail."""
    worker.plant = "swapped_rows"
    assert make_refit(certify="never")(6).certified is False


def test_models_that_compute_something_different_are_found_by_the_probe(make_refit, worker):
    worker.plant = "probe"
    with pytest.raises(RefitError, match=r"logprobs of the probe differ .* though every checksum agrees"):
        make_refit()(7)


def test_an_engine_that_was_started_anew_is_brought_up_and_certified(make_refit, generator):
    refit = make_refit()
    assert [refit(version).certified for version in (8, 9, 9)] == [True, True, False]
    assert refit.catch_up(9, generator).certified
    assert [refit(version).certified for version in (9, 9, 9)] == [True, True, False]


def test_a_missing_tensor_is_named_within_seconds_and_the_engine_says_that_it_is_torn(make_refit, worker):
    """Covers: a failing refit only prints and the trainer hangs."""
    refit = make_refit()
    worker.plant = "skipped"
    began = time.monotonic()
    with pytest.raises(RefitError, match=r"lm_head\.weight is missing") as raised:
        refit(10)
    assert time.monotonic() - began < 30
    assert "the trainer: lm_head.weight is missing" in str(raised.value.__notes__)  # the engine heard of it, too
    worker.plant = None
    with pytest.raises(RefitError, match="0 of 1 workers of samplers connected") as raised:
        refit(11)
    assert "left without weights by refit 10" in str(raised.value.__notes__)
