"""The refit's checksum: literal values, order, and equality with the formula in Python's integers."""

from __future__ import annotations

import pytest
import torch

from grpo_recipes.generation.sync import checksum
from grpo_recipes.generation.sync.checksum import Checksums, differences, splitmix64, word_sum


def by_formula(tensor: torch.Tensor) -> int:
    """The docstring's formula, word by word."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 4)
    total = 0
    for i in range(len(data) // 4):
        word = int.from_bytes(data[4 * i : 4 * i + 4], "little", signed=True)
        block, place = divmod(i, checksum.BLOCK)
        total += (splitmix64(checksum.BLOCK + block) | 1) * word * (splitmix64(place) | 1)
    return total % 2**64


def test_splitmix64_gives_the_published_sequence():
    """The first outputs for seed 0, as in the reference implementation's test vectors."""
    assert [splitmix64(n) for n in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (0,)])
def test_it_is_the_formula(dtype, shape):
    tensor = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    assert int(word_sum(tensor)) % 2**64 == by_formula(tensor)


def test_it_is_the_formula_over_several_blocks(monkeypatch):
    monkeypatch.setattr(checksum, "BLOCK", 8)
    checksum._factors.cache_clear()
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(2)).bfloat16()
    try:
        assert int(word_sum(tensor)) % 2**64 == by_formula(tensor)
        assert int(word_sum(tensor[1:])) % 2**64 == by_formula(tensor[1:])  # does not start at a whole word
    finally:
        checksum._factors.cache_clear()


def test_places_and_values_show():
    """Covers: a checksum that a swap of rows or of neighbours passes."""
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    whole = int(word_sum(rows))
    assert int(word_sum(rows[[1, 0, 2, 3, 4, 5]])) != whole
    assert int(word_sum(rows.T.contiguous())) != whole
    changed = rows.clone()
    changed[5, 3] = torch.nextafter(changed[5, 3], torch.tensor(9.0))
    assert int(word_sum(changed)) != whole
    negated = rows.clone()
    negated[0, 0] = -negated[0, 0]  # one bit
    assert int(word_sum(negated)) != whole
    assert int(word_sum(torch.tensor([0.0, -0.0]))) != int(word_sum(torch.tensor([-0.0, 0.0])))
    assert int(word_sum(rows.T)) == int(word_sum(rows.T.contiguous()))  # of the values, not of their strides


def test_differences_name_the_tensors():
    a, b = torch.ones(2, 3), torch.zeros(2, 3)
    trainer, sampler = Checksums(), Checksums()
    for name, tensor in (("a", a), ("b", b), ("c", a)):
        trainer.add(name, tensor)
    assert [name for name, _ in sampler.over([("a", b), ("b", b), ("d", a.view(3, 2))])] == ["a", "b", "d"]
    c_missing, d_extra, a_differs = differences(trainer.result(), sampler.result())
    assert c_missing == "c is missing" and d_extra == "d is not of the trainer" and a_differs.startswith("a differs (")
    assert trainer.result()["b"] == "float32[2, 3] 0000000000000000"
    assert differences(trainer.result(), trainer.result()) == [] and Checksums().result() == {}
