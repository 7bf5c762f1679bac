"""The CUDA paths of the trainer and the embedded sampler, against transformers and float64 on the same weights."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from grpo_recipes.engine.losses import policy_loss
from grpo_recipes.policy.attention import pack, packed_attention
from grpo_recipes.policy.contract import Batch
from grpo_recipes.recipe.schema import GenerationConfig, MegatronConfig, PolicyConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

VOCAB = 500
# Against float32 on the CPU. fp32: kernels sum in another order. bf16: 8 bits of mantissa through 3 layers.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06}
# Both are bf16 and see the same weights; sampler and trainer run different attention kernels.
SAMPLER_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06}


@pytest.mark.parametrize("lengths", [[5, 9, 3, 40, 1], [9000, 17, 130]])
def test_varlen_attention_against_float64(lengths):
    g = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query, key, value = (torch.randn(total, heads, 64, generator=g) for heads in (8, 2, 2))
    cuda = [x.cuda().to(torch.bfloat16).requires_grad_() for x in (query, key, value)]
    out = packed_attention(*cuda, pack(torch.tensor(lengths), "cuda"), 64**-0.5)
    weight = torch.randn(total, 8, 64, generator=g)
    (out.float() * weight.cuda()).sum().backward()
    # The reference reads the same rounded inputs, on the GPU in float64 without packing, a sequence at a time.
    exact = [x.detach().double().requires_grad_() for x in cuda]
    start, parts = 0, []
    for n in lengths:
        q, k, v = (x[start : start + n].transpose(0, 1) for x in exact)
        k, v = k.repeat_interleave(4, 0), v.repeat_interleave(4, 0)
        rows = []
        for head in range(8):
            scores = (q[head] @ k[head].T) * 64**-0.5
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            rows.append(scores.softmax(-1) @ v[head])
        parts.append(torch.stack(rows, 1))
        start += n
    reference = torch.cat(parts)
    (reference * weight.cuda().double()).sum().backward()
    assert relative(out, reference) < 1e-2
    for got, want in zip(cuda, exact, strict=True):
        assert relative(got.grad, want.grad) < 2e-2


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model.float()


def make_policy(folder, precision):
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    config = PolicyConfig(
        model_name=str(folder),
        train_global_batch_size=4,
        max_total_sequence_length=512,
        precision=precision,
        megatron_cfg=MegatronConfig(optimizer={"lr": 1e-3, "weight_decay": 0.0}),
        generation=GenerationConfig(max_new_tokens=8),
    )
    return MegatronPolicy(config, 0.8, 10, folder)


def make_batch(lengths=(37, 12, 300, 5)):
    g = torch.Generator().manual_seed(1)
    total = sum(lengths)
    position = torch.cat([torch.arange(n) for n in lengths])
    mask = position >= 3
    return Batch(
        token_ids=torch.randint(0, VOCAB, (total,), generator=g),
        lengths=torch.tensor(lengths),
        mask=mask,
        weights=mask / mask.sum(),
        advantages=torch.randn(total, generator=g) * mask,
        sampler_logprobs=torch.zeros(total),
    )


def reference_logprobs(model, batch):
    found = []
    for ids in batch.token_ids.split(batch.lengths.tolist()):
        logp = (model(ids[None]).logits[0] / 0.8).log_softmax(-1)
        found.append(torch.cat([torch.zeros(1), logp[:-1].gather(1, ids[1:, None])[:, 0]]))
    return torch.cat(found)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_logprobs_and_gradient_norm_agree_with_transformers(checkpoint, precision):
    folder, model = checkpoint
    policy = make_policy(folder, precision)
    print(policy.describe())
    batch = make_batch()
    [logprobs] = policy.logprobs([batch])
    reference = reference_logprobs(model, batch)
    assert (logprobs - reference).abs().max().item() < TOLERANCE[precision]

    batch = replace(batch, old_logprobs=reference.detach())
    loss = partial(
        policy_loss,
        clip_min=10.0,
        clip_max=10.0,
        dual_clip=None,
        kl_penalty=0.0,
        kl_type="k3",
    )
    model.zero_grad()
    exact = -((reference - reference.detach()).exp() * batch.advantages * batch.weights).sum()
    exact.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    stats = policy.train([batch.select([0, 2]), batch.select([1, 3])], loss)
    assert not stats.skipped
    assert stats.grad_norm == pytest.approx(norm, rel=1e-3 if precision == "float32" else 5e-2)
    assert stats.loss == pytest.approx(exact.item(), abs=1e-4 if precision == "float32" else 2e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sampled_logprobs_equal_the_trainers(checkpoint, precision):
    from grpo_recipes.generation.contract import Request, Sampling, generate
    from grpo_recipes.generation.megatron.sampler import MegatronSampler

    policy = make_policy(checkpoint[0], precision)
    sampler = MegatronSampler(policy.decoder, max_batch_size=16, max_positions=2048, device="cuda")
    sampling = Sampling(temperature=0.8, max_new_tokens=40, stop_token_ids=(7,))
    prompts = [tuple(range(10, 10 + n)) for n in (3, 30, 3, 111, 8)]
    done = generate(sampler, [Request(i, p, 1000 + i, sampling) for i, p in enumerate(prompts)])
    batch = Batch(
        token_ids=torch.cat([t for p, c in zip(prompts, done, strict=True) for t in (torch.tensor(p), c.token_ids)]),
        lengths=torch.tensor([len(p) + len(c.token_ids) for p, c in zip(prompts, done, strict=True)]),
        mask=torch.cat(
            [t for p, c in zip(prompts, done, strict=True) for t in (torch.zeros(len(p)), torch.ones(len(c.token_ids)))]
        ).bool(),
        weights=torch.zeros(sum(len(p) + len(c.token_ids) for p, c in zip(prompts, done, strict=True))),
        advantages=torch.zeros(0),
        sampler_logprobs=torch.zeros(0),
    )
    [recomputed] = policy.logprobs([batch])
    sampled = torch.cat([c.logprobs for c in done])
    assert (recomputed[batch.mask] - sampled).abs().max().item() < SAMPLER_TOLERANCE[precision]


def test_save_and_load_continue_exactly(checkpoint, tmp_path):
    """Three more steps after loading equal three more steps without; fp32, deterministic kernels are not asked for."""
    batch = make_batch()
    loss = partial(
        policy_loss,
        clip_min=0.2,
        clip_max=0.2,
        dual_clip=None,
        kl_penalty=0.0,
        kl_type="k3",
    )

    def steps(policy, count):
        for _ in range(count):
            [old] = policy.logprobs([batch])
            stats = policy.train([replace(batch, old_logprobs=old)], loss)
        return stats

    policy = make_policy(checkpoint[0], "float32")
    steps(policy, 2)
    policy.save(tmp_path)
    straight = steps(policy, 3)
    again = make_policy(checkpoint[0], "float32")
    again.load(tmp_path)
    resumed = steps(again, 3)
    assert resumed.grad_norm == pytest.approx(straight.grad_norm, rel=1e-4)
    assert resumed.learning_rate == straight.learning_rate
