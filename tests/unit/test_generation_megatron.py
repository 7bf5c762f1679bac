"""The embedded sampler on the Megatron model: its logprobs against the trainer's own and against transformers."""

import pytest
import torch

from grpo_recipes.generation.contract import Request, Sampling, generate
from grpo_recipes.policy.contract import Batch, LossOutputs
from grpo_recipes.recipe.schema import GenerationConfig, MegatronConfig, PolicyConfig

VOCAB = 50  # no multiple of what Megatron pads to


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_policy(folder, temperature):
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    config = PolicyConfig(
        model_name=str(folder),
        train_global_batch_size=4,
        max_total_sequence_length=128,
        precision="float32",
        megatron_cfg=MegatronConfig(optimizer={"lr": 0.05, "weight_decay": 0.0}),
        generation=GenerationConfig(max_new_tokens=8),
    )
    return MegatronPolicy(config, temperature, 10, folder)


def make_sampler(policy, **options):
    from grpo_recipes.generation.megatron.sampler import MegatronSampler

    return MegatronSampler(policy.decoder, max_positions=128, **{"max_batch_size": 64} | options)


def requests_of(temperature, count=24, stop=(7,)):
    """Prompts of 1 to 41 tokens, each shared by three requests."""
    sampling = Sampling(temperature, 20, stop)
    lengths = [1, 41, 3, 17, 5, 2, 29, 8]
    return [Request(i, tuple(range(i // 3, i // 3 + lengths[i // 3])), 1000 + i, sampling) for i in range(count)]


def sequences_of(requests, done):
    return [torch.tensor([*r.prompt_ids, *c.token_ids.tolist()]) for r, c in zip(requests, done, strict=True)]


def batch_of(requests, done):
    sequences = sequences_of(requests, done)
    total = sum(map(len, sequences))
    generated = [torch.arange(len(s)) >= len(r.prompt_ids) for r, s in zip(requests, sequences, strict=True)]
    return Batch(
        token_ids=torch.cat(sequences),
        lengths=torch.tensor([len(s) for s in sequences]),
        mask=torch.cat(generated),
        weights=torch.ones(total) / total,
        advantages=torch.zeros(total),
        sampler_logprobs=torch.zeros(total),
    )


def worst(a, b):
    return (a - b).abs().max().item()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_sampled_logprobs_equal_the_trainers_and_transformers(checkpoint, temperature):
    """Covers: temperature missing from one of the logprobs; the recorded logprob belongs to another token; padding of
    the vocabulary is sampled. 1e-5: float32 sums in another order."""
    from transformers import LlamaForCausalLM

    policy = make_policy(checkpoint, temperature)
    requests = requests_of(temperature)
    done = generate(make_sampler(policy), requests)
    sampled = torch.cat([c.logprobs for c in done])
    assert {c.finish_reason for c in done} == {"stop", "length"}

    batch = batch_of(requests, done)
    [recomputed] = policy.logprobs([batch])
    assert worst(recomputed[batch.mask], sampled) < 1e-5

    model = LlamaForCausalLM.from_pretrained(checkpoint)
    reference = []
    for request, ids in zip(requests, sequences_of(requests, done), strict=True):
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0].double() / temperature).log_softmax(-1)
        reference.append(logprobs[:-1].gather(1, ids[1:, None])[len(request.prompt_ids) - 1 :, 0])
    assert worst(torch.cat(reference), sampled) < 1e-5

    # A batch of five, refilled and thinned out all the time, draws the same.
    small = generate(make_sampler(policy, max_batch_size=5), requests)
    assert all(a.token_ids.equal(b.token_ids) for a, b in zip(small, done, strict=True))


def cross_entropy(inputs):
    return LossOutputs(loss=-(inputs.logprobs * inputs.batch.weights).sum(), sums={}, maxima={})


def test_an_optimizer_step_in_the_middle_of_rollouts(checkpoint):
    """Covers: stale prefix cache after refit. Tokens drawn before the step are the old weights', those after it the
    new ones', although trainer and sampler share their weights."""
    policy = make_policy(checkpoint, 1.0)
    sampler = make_sampler(policy, version=3)
    requests = requests_of(1.0, stop=())
    requests[0] = Request(0, (1, 2, 3), 5, Sampling(1.0, 6, ()))
    sampler.submit(requests)
    done = [next(sampler.completions())]
    old_policy = make_policy(checkpoint, 1.0)
    sampler.pause()
    batch = batch_of(requests[:1], done)
    assert not policy.train([batch], cross_entropy).skipped
    sampler.resume(4)
    done += sampler.completions()
    done.sort(key=lambda c: c.request_id)

    batch = batch_of(requests, done)
    sampled, versions = torch.cat([c.logprobs for c in done]), torch.cat([c.weight_versions for c in done])
    assert all(c.weight_versions.tolist() == [3] * 6 + [4] * 14 for c in done[1:])
    [old], [new] = old_policy.logprobs([batch]), policy.logprobs([batch])
    old, new = old[batch.mask], new[batch.mask]
    assert worst(old[versions == 3], sampled[versions == 3]) < 1e-5
    assert worst(new[versions == 4], sampled[versions == 4]) < 1e-5
    assert worst(old, new) > 0.1


def test_the_trainer_is_left_as_it_was(checkpoint):
    policy = make_policy(checkpoint, 1.0)
    requests = requests_of(1.0)
    policy.model[0].train()
    done = generate(make_sampler(policy), requests)
    assert policy.model[0].training
    batch = batch_of(requests, done)
    sampled_first = policy.train([batch], cross_entropy)
    never_sampled = make_policy(checkpoint, 1.0).train([batch], cross_entropy)
    assert sampled_first == never_sampled
