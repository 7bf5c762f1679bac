import pytest
import torch

from grpo_recipes.policy import attention
from grpo_recipes.policy.attention import (
    KeyValueCache,
    cached_attention,
    pack,
    packed_attention,
)
from grpo_recipes.policy.context_parallel import ContextShard


def naive(query, key, value, lengths, scale):
    """softmax(q k / sqrt d) v, one sequence, one head at a time, float64."""
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    for q, k, v in zip(*(x.double().split(lengths) for x in (query, key, value)), strict=True):
        length = len(q)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        heads = []
        for head in range(q.shape[1]):
            scores = (q[:, head] @ k[:, head // repeats].T * scale).masked_fill(hidden, -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, head // repeats])
        outputs.append(torch.stack(heads, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "lengths", [[5], [1, 1, 1], [7, 7, 7], [3, 40, 1, 17, 16, 39, 2, 30], [9, 20, 4, 64, 33]], ids=str
)
def test_packed_equals_each_sequence_alone(lengths):
    """Covers: packed boundaries off by one."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    query = torch.randn(tokens, 4, 8, requires_grad=True)
    key, value = torch.randn(2, tokens, 2, 8).unbind()
    key.requires_grad_(), value.requires_grad_()
    out = packed_attention(query, key, value, pack(torch.tensor(lengths)), 8**-0.5)
    expected = naive(query, key, value, lengths, 8**-0.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)

    upstream = torch.randn(tokens, 4, 8)
    found = torch.autograd.grad((out * upstream).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * upstream).sum(), (query, key, value))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=0)


def test_few_calls_and_little_padding():
    lengths = torch.randint(1, 4000, (700,), generator=torch.Generator().manual_seed(3))
    packing = pack(lengths)
    assert sum(group.rows for group in packing.groups) == 700
    assert sum(group.rows * group.queries for group in packing.groups) < lengths.sum() / 0.75 + 16 * 700
    assert len(packing.groups) <= 25
    short = pack(torch.randint(1, 12, (512,)))
    assert len(short.groups) == 1


def test_positions_start_again_with_each_sequence():
    packing = pack(torch.tensor([3, 1, 2]))
    assert packing.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert packing.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packing.max_length == 3


def test_context_parallel_ranks_hold_a_front_and_a_back_chunk():
    """Two sequences of 8 and 4 tokens over 2 ranks, chunks of 2 and of 1."""
    first, second = (pack(torch.tensor([8, 4]), context=ContextShard(rank, 2, None)) for rank in (0, 1))
    assert first.held.tolist() == [0, 1, 6, 7, 8, 11]
    assert first.positions.tolist() == [0, 1, 6, 7, 0, 3]
    assert second.held.tolist() == [2, 3, 4, 5, 9, 10]
    assert second.cu_queries.tolist() == [0, 2, 4, 5, 6]
    assert second.cu_keys.tolist() == [0, 4, 10, 12, 15]
    gathered = torch.cat((first.held, second.held))
    assert gathered[first.natural].tolist() == list(range(12))
    assert gathered[second.key_tokens].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 8, 9, 8, 9, 10]


def test_context_parallel_ranks_together_attend_as_one(monkeypatch):
    torch.manual_seed(0)
    lengths = [16, 8, 40]
    query, key, value = torch.randn(64, 4, 8), *torch.randn(2, 64, 2, 8).unbind()
    found = torch.empty(64, 4, 8)
    for rank in (0, 1):
        packing = pack(torch.tensor(lengths), context=ContextShard(rank, 2, None))
        order = packing.natural.argsort()
        monkeypatch.setattr(attention, "gather_keys", lambda *_, order=order: torch.stack((key, value), 1)[order])
        held = packing.held
        found[held] = packed_attention(query[held], key[held], value[held], packing, 8**-0.5)
    torch.testing.assert_close(found.double(), naive(query, key, value, lengths, 8**-0.5), atol=1e-6, rtol=0)


def test_cache_hides_padding_and_keeps_the_rows_selected():
    torch.manual_seed(0)
    lengths, width = [2, 4, 3], 4
    packing = pack(torch.tensor(lengths))
    key, value = torch.randn(2, sum(lengths), 2, 8).unbind()
    cache = KeyValueCache(width - torch.tensor(lengths), capacity=6, length=width)
    cache.fill(1, key, value, packing)
    cache.select(torch.tensor([2, 0]))
    cache.length += 1
    new_key, new_value = torch.randn(2, 2, 2, 8).unbind()
    query = torch.randn(2, 4, 8)
    keys, values = cache.append(1, new_key, new_value)
    out = cached_attention(query, keys, values, cache.visible, 8**-0.5)

    starts = [6, 0]
    for row, (start, length) in enumerate(zip(starts, [3, 2], strict=True)):
        all_keys = torch.cat((key[start : start + length], new_key[row : row + 1]))
        all_values = torch.cat((value[start : start + length], new_value[row : row + 1]))
        queries = torch.cat((torch.zeros(length, 4, 8), query[row : row + 1]))
        expected = naive(queries, all_keys, all_values, [length + 1], 8**-0.5)[-1]
        torch.testing.assert_close(out[row].double(), expected, atol=1e-6, rtol=0)
