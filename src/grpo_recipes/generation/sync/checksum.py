"""A checksum of a tensor's bits that knows their order, in integers: exact, whatever the device.

The tensor's bytes are read as signed 32-bit words x_i (zeros fill up the last). With n words to a block,

    checksum = sum over blocks b of  m_b * sum over j < n of  x_(b n + j) * w_j      modulo 2^64,

where w_j and m_b are odd and come from SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
2014). An odd factor makes any change of one word show. Two words that change places show, too, unless w_j - w_k is a
multiple of 2^31: one pair in two thousand million. Against accidents, not against somebody who looks for a collision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2**20  # words: 4 MiB of the tensor, and 8 MiB of factors or products
MASK = 2**64 - 1


class Checksums:
    """Of many tensors by name. Results stay on the device until they are asked for, so that nothing waits."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self._sums[name] = word_sum(tensor)
        self._kinds[name] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    def over(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors; each is added as it is handed on."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def result(self) -> dict[str, str]:
        """By name: dtype, shape and 16 hexadecimal digits."""
        if not self._sums:
            return {}
        values = torch.stack(list(self._sums.values())).tolist()
        return {
            name: f"{self._kinds[name]} {value & MASK:016x}" for name, value in zip(self._sums, values, strict=True)
        }


@torch.no_grad()
def word_sum(tensor: Tensor) -> Tensor:
    """int64 scalar on the tensor's device, by the formula above; shape and dtype do not enter."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    factors = _factors(data.device)
    for number, start in enumerate(range(0, len(data), 4 * BLOCK)):
        block = data[start : start + 4 * BLOCK]
        if len(block) % 4:
            block = torch.nn.functional.pad(block, (0, -len(block) % 4))
        elif block.storage_offset() % 4:
            block = block.clone()
        words = block.view(torch.int32)
        total += (words * factors[: len(words)]).sum() * _block_factor(number)  # int64 wraps modulo 2^64
    return total


def differences(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    """What is wrong, a line for each tensor."""
    return [
        *(f"{name} is missing" for name in wanted if name not in found),
        *(f"{name} is not of the trainer" for name in found if name not in wanted),
        *(
            f"{name} differs ({wanted[name]} at the trainer, {found[name]} at the sampler)"
            for name in wanted
            if name in found and found[name] != wanted[name]
        ),
    ]


def splitmix64(number: int) -> int:
    """The number-th output of SplitMix64 with seed 0."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _block_factor(number: int) -> int:
    return _signed(splitmix64(BLOCK + number) | 1)


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    """int64 [BLOCK]: splitmix64(j) | 1, computed on the CPU."""

    def shifted(z: Tensor, bits: int) -> Tensor:  # without copies of the sign bit
        return (z >> bits) & (2 ** (64 - bits) - 1)

    z = torch.arange(1, BLOCK + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return ((z ^ shifted(z, 31)) | 1).to(device)
