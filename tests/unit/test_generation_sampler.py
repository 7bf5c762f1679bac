"""The embedded sampler over an independent decoder: transformers' Llama with its own cache."""

import weakref
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from grpo_recipes.errors import UserError
from grpo_recipes.generation.contract import Request, Sampling, generate
from grpo_recipes.generation.megatron.sampler import MegatronSampler

VOCAB = 32


class TransformersDecoder:
    def __init__(self, model):
        self.model, self.cache = model, DynamicCache(config=model.config)

    def prefill(self, token_ids_BT, pad_lengths_B):
        columns = torch.arange(token_ids_BT.shape[1])
        self.mask = (columns >= pad_lengths_B[:, None]).long()
        self.next = token_ids_BT.shape[1] - pad_lengths_B
        return self.forward(token_ids_BT, (columns - pad_lengths_B[:, None]).clamp(min=0))

    def step(self, token_ids_B):
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        logits = self.forward(token_ids_B[:, None], self.next[:, None])
        self.next = self.next + 1
        return logits

    def select(self, rows):
        self.cache.batch_select_indices(rows)
        self.mask, self.next = self.mask[rows], self.next[rows]

    def forward(self, token_ids, positions):
        out = self.model(token_ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache)
        return out.logits[:, -1]


@dataclass
class Spy:
    """Makes decoders, and notes the shape of what each reads and how many rows each step has."""

    model: LlamaForCausalLM
    prefills: list[tuple[int, int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def __call__(self, *, max_batch_size, max_sequence_length):
        decoder = TransformersDecoder(self.model)
        prefill, step, length = decoder.prefill, decoder.step, 0

        def noted_prefill(token_ids_BT, pad_lengths_B):
            nonlocal length
            length = token_ids_BT.shape[1]
            self.prefills.append(tuple(token_ids_BT.shape))
            return prefill(token_ids_BT, pad_lengths_B)

        def noted_step(token_ids_B):
            nonlocal length
            length += 1
            assert length < max_sequence_length
            assert len(token_ids_B) <= max_batch_size
            self.steps.append(len(token_ids_B))
            return step(token_ids_B)

        decoder.prefill, decoder.step = noted_prefill, noted_step
        return decoder


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def sampler_of(model, **options):
    spy = Spy(model)
    return MegatronSampler(spy, **{"max_batch_size": 64, "max_positions": 64} | options), spy


def requests_of(count, *, temperature=1.0, max_new_tokens=12, stop=(3,), first_seed=1000):
    """Prompts of 1 to 9 tokens, every one shared by two requests."""
    sampling = Sampling(temperature, max_new_tokens, stop)
    prompts = [tuple((7 * (i // 2) + j) % VOCAB for j in range(1 + i // 2 % 9)) for i in range(count)]
    return [Request(i, prompt, first_seed + i, sampling) for i, prompt in enumerate(prompts)]


def full_forward_logprobs(model, request, token_ids):
    """float64 log-softmax of one unpadded forward over the whole sequence."""
    ids = torch.tensor([*request.prompt_ids, *token_ids.tolist()])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(request.prompt_ids) - 1 : -1].double()
    logprobs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, token_ids[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
def test_logprobs_equal_a_full_forward(model, temperature):
    """Covers: temperature missing from one of the logprobs; the recorded logprob belongs to another token."""
    sampler, _ = sampler_of(model)
    requests = requests_of(40, temperature=temperature)
    for request, done in zip(requests, generate(sampler, requests), strict=True):
        assert done.request_id == request.request_id
        assert done.token_ids.dtype == torch.int64
        assert done.logprobs.dtype == torch.float32
        assert done.weight_versions.dtype == torch.int32
        expected = full_forward_logprobs(model, request, done.token_ids)
        assert (done.logprobs - expected).abs().max().item() < 1e-5


def test_greedy_takes_the_most_likely_token(model):
    sampler, _ = sampler_of(model)
    request = replace(requests_of(9)[8], sampling=Sampling(0.0, 6, ()))
    ids = list(request.prompt_ids)
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert generate(sampler, [request])[0].token_ids.tolist() == ids[len(request.prompt_ids) :]


def test_stop_token_is_kept_and_length_is_counted(model):
    sampler, _ = sampler_of(model)
    requests = requests_of(60, stop=(3, 5))
    finished = generate(sampler, requests)
    assert {c.finish_reason for c in finished} == {"stop", "length"}
    for c in finished:
        *before, last = c.token_ids.tolist()
        assert not {3, 5} & set(before)
        assert (c.finish_reason == "stop") == (last in {3, 5})
        assert len(c.token_ids) == 12 or c.finish_reason == "stop"
        assert len(c.token_ids) == len(c.logprobs) == len(c.weight_versions)
        assert c.token_ids.untyped_storage().nbytes() == 8 * len(c.token_ids)


def test_a_stop_token_at_the_last_place_is_a_stop(model):
    sampler, _ = sampler_of(model)
    [free] = generate(sampler, [replace(requests_of(1)[0], sampling=Sampling(1.0, 4, ()))])
    token_ids = free.token_ids.tolist()
    assert token_ids.count(token_ids[-1]) == 1
    [stopped] = generate(sampler, [replace(requests_of(1)[0], sampling=Sampling(1.0, 4, (token_ids[-1],)))])
    assert stopped.token_ids.tolist() == token_ids
    assert stopped.finish_reason == "stop"


def test_the_draw_does_not_depend_on_the_batch(model):
    requests = requests_of(64)
    sampler, _ = sampler_of(model)
    together = generate(sampler, requests)
    for request in (requests[0], requests[17], requests[63]):
        alone, _ = sampler_of(model)
        [single] = generate(alone, [request])
        assert single.token_ids.tolist() == together[request.request_id].token_ids.tolist()
    small, _ = sampler_of(model, max_batch_size=5)
    for a, b in zip(generate(small, requests), together, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason


def test_seeds_reach_the_sampler(model):
    """Covers: every replica samples the same completions, or the run's seed never reaches the sampler."""
    sampler, _ = sampler_of(model)
    prompt, sampling = (1, 2, 3), Sampling(1.0, 12, ())
    first = generate(sampler, [Request(i, prompt, i, sampling) for i in range(16)])
    assert len({tuple(c.token_ids.tolist()) for c in first}) == 16
    again = generate(sampler, [Request(i, prompt, i, sampling) for i in range(16)])
    assert all(a.token_ids.equal(b.token_ids) for a, b in zip(first, again, strict=True))


def test_requests_may_differ_in_every_setting(model):
    sampler, _ = sampler_of(model)
    requests = [
        replace(r, sampling=Sampling((0.0, 0.7, 1.3)[r.request_id % 3], 1 + r.request_id % 12, (3,) * (i % 2)))
        for i, r in enumerate(requests_of(24))
    ]
    for request, done in zip(requests, generate(sampler, requests), strict=True):
        assert len(done.token_ids) <= request.sampling.max_new_tokens
        expected = full_forward_logprobs(model, request, done.token_ids)
        assert (done.logprobs - expected).abs().max().item() < 1e-5


def test_a_prompt_shared_by_samples_is_read_once(model):
    sampler, spy = sampler_of(model)
    generate(sampler, requests_of(18))
    assert spy.prefills == [(9, 9)]


def test_finished_rows_leave_and_queued_requests_join(model):
    sampler, spy = sampler_of(model, max_batch_size=8)
    requests = requests_of(40, max_new_tokens=20)
    assert sorted(c.request_id for c in generate(sampler, requests)) == list(range(40))
    assert max(spy.steps) <= 8
    assert min(spy.steps) < 8  # dropped
    assert len(spy.prefills) > 40 // 8  # refilled before the batch was empty


def test_completions_stream_as_they_finish(model):
    sampler, spy = sampler_of(model)
    lengths = [9, 2, 5]
    sampler.submit([replace(r, sampling=Sampling(1.0, lengths[r.request_id], ())) for r in requests_of(3)])
    seen = [(c.request_id, len(spy.steps) + 1) for c in sampler.completions()]
    assert seen == [(1, 2), (2, 5), (0, 9)]


def test_an_abandoned_iterator_loses_nothing(model):
    sampler, _ = sampler_of(model)
    sampler.submit(requests_of(20))
    taken = [next(sampler.completions()) for _ in range(5)]
    sampler.submit([replace(r, request_id=100 + r.request_id) for r in requests_of(4)])
    taken += sampler.completions()
    assert sorted(c.request_id for c in taken) == [*range(20), *range(100, 104)]
    assert list(sampler.completions()) == []


def test_aborted_requests_never_arrive_and_others_are_drawn_as_before(model):
    wanted = {c.request_id: c.token_ids.tolist() for c in generate(sampler_of(model)[0], requests_of(12))}
    sampler, _ = sampler_of(model, max_batch_size=8)  # four are in its queue
    sampler.submit(requests_of(12))
    assert sampler.poll(0.0) == []
    first = next(sampler.completions())
    gone = [n for n in (0, 3, 7, 11, 99) if n != first.request_id]
    sampler.abort(gone)
    found = [first]
    while more := sampler.poll(1.0, most=2):
        assert len(more) <= 2
        found += more
    assert sorted(c.request_id for c in found) == [n for n in range(12) if n not in gone]
    assert all(c.token_ids.tolist() == wanted[c.request_id] for c in found)
    sampler.submit(requests_of(1))  # the id is free again
    sampler.abort([0])
    assert sampler.poll(1.0) == [] and list(sampler.completions()) == []


def disturb(model):
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))


def interrupted(sampler, then):
    """Ten requests without stop tokens, the first of 3 tokens, the rest of 8; `then` runs after the first one ends."""
    requests = [
        replace(r, sampling=Sampling(1.0, 8 if r.request_id else 3, ())) for r in requests_of(10, max_new_tokens=8)
    ]
    sampler.submit(requests)
    stream, done = sampler.completions(), []
    done.append(next(stream))
    then()
    done += sampler.completions()
    return requests, {c.request_id: c for c in done}


@pytest.mark.parametrize("how", ["pause and resume", "update_weights"])
def test_new_weights_never_meet_an_old_cache(model, how):
    """Covers: stale prefix cache after refit. Tokens before are the old weights', tokens after are the new ones'."""
    sampler, spy = sampler_of(model, version=4)
    before = {}

    def refit():
        before.update({name: value.clone() for name, value in model.state_dict().items()})
        if how == "pause and resume":
            sampler.pause()
            assert list(sampler.completions()) == []
        disturb(model)
        if how == "pause and resume":
            sampler.resume(5)
        else:
            sampler.update_weights([], iter(()), 5)

    requests, done = interrupted(sampler, refit)
    assert done[0].weight_versions.tolist() == [4, 4, 4]
    new = {i: full_forward_logprobs(model, requests[i], done[i].token_ids) for i in range(1, 10)}
    model.load_state_dict(before)
    for i in range(1, 10):
        assert done[i].weight_versions.tolist() == [4] * 3 + [5] * 5
        old = full_forward_logprobs(model, requests[i], done[i].token_ids)
        assert (done[i].logprobs[:3] - old[:3]).abs().max().item() < 1e-5
        assert (done[i].logprobs[3:] - new[i][3:]).abs().max().item() < 1e-5
        assert (old - new[i]).abs().max().item() > 1e-2  # the weights did change
    # The one that finished in the row before is not read again.
    assert spy.prefills[1:] == [(9, 5 + 3)]


def test_pause_changes_no_token(model):
    sampler, _ = sampler_of(model)
    _, plain = interrupted(sampler, lambda: None)
    sampler, spy = sampler_of(model)

    def pause():
        sampler.pause()
        assert list(sampler.completions()) == []
        sampler.resume(0)

    _, paused = interrupted(sampler, pause)
    assert all(paused[i].token_ids.equal(plain[i].token_ids) for i in range(10))
    assert len(spy.prefills) == 1  # same weights: the cache is still good


def test_sleep_gives_the_cache_back_and_wake_goes_on(model):
    """Covers: sleep leaks memory."""
    sampler, _ = sampler_of(model)
    _, plain = interrupted(sampler, lambda: None)
    references = []

    def new_decoder(**sizes):
        decoder = TransformersDecoder(model)
        references.append(weakref.ref(decoder.cache))
        return decoder

    sampler = MegatronSampler(new_decoder, max_batch_size=64, max_positions=64)

    def nap():
        assert [r() is None for r in references] == [False]
        sampler.sleep()
        assert [r() is None for r in references] == [True]
        with pytest.raises(RuntimeError, match="asleep"):
            next(sampler.completions())
        sampler.wake()

    _, woken = interrupted(sampler, nap)
    assert all(woken[i].token_ids.equal(plain[i].token_ids) for i in range(10))
    assert [r() is None for r in references] == [True, True]  # nothing is held once all requests are finished


def test_a_failed_step_can_be_tried_again(model):
    sampler, _ = sampler_of(model)
    _, plain = interrupted(sampler, lambda: None)

    def fail_once():
        forward, model.forward = model.forward, lambda *a, **k: (_ for _ in ()).throw(MemoryError("planted"))
        with pytest.raises(MemoryError, match="planted"):
            next(sampler.completions())
        model.forward = forward

    _, retried = interrupted(sampler, fail_once)
    assert all(retried[i].token_ids.equal(plain[i].token_ids) for i in range(10))


def test_gradients_stay_on_for_the_caller(model):
    sampler, _ = sampler_of(model)
    sampler.submit(requests_of(4))
    for _ in sampler.completions():
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((1,) * 60, Sampling(1.0, 5, ()), "60 tokens and 5 new ones exceed the model's 64 positions"),
        ((), Sampling(1.0, 5, ()), "no tokens"),
        ((1,), Sampling(1.0, 0, ()), "0 tokens cannot"),
        ((1,), Sampling(-1.0, 5, ()), "not a temperature"),
        ((1,), Sampling(float("nan"), 5, ()), "not a temperature"),
    ],
)
def test_bad_requests_are_refused_before_work_starts(model, prompt, sampling, message):
    sampler, spy = sampler_of(model)
    with pytest.raises(UserError, match=message):
        sampler.submit([requests_of(1)[0], Request(9, prompt, 0, sampling)])
    assert list(sampler.completions()) == []
    assert not spy.prefills


def test_the_longest_allowed_request_runs(model):
    sampler, _ = sampler_of(model)
    [done] = generate(sampler, [Request(0, (1,) * 60, 0, Sampling(1.0, 4, ()))])
    assert len(done.token_ids) == 4
    assert done.finish_reason == "length"


def test_request_ids_are_unique_among_those_outstanding(model):
    sampler, _ = sampler_of(model)
    sampler.submit(requests_of(2))
    with pytest.raises(ValueError, match="request ids"):
        sampler.submit(requests_of(1))
    with pytest.raises(ValueError, match="request ids"):
        sampler.submit([replace(r, request_id=7) for r in requests_of(2)])
