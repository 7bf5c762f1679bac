"""What the sampler needs of a model: logits with a key/value cache. policy/megatron/decode.py has Megatron's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Decoder(Protocol):
    """A cache for one batch of token sequences over weights it shares with their owner."""

    def prefill(self, token_ids_BT: Tensor, pad_lengths_B: Tensor) -> Tensor:
        """Read int64 [B, T] sequences, left-padded by int64 [B] tokens. Returns [B, V], logits after the last token."""

    def step(self, token_ids_B: Tensor) -> Tensor:
        """Append one token, int64 [B], to every row held. Returns [B, V], logits after it, before temperature."""

    def select(self, rows: Tensor) -> None:
        """Hold these rows from now on: int64, indices into the rows held now, in any order, a row any number of times."""


class NewDecoder(Protocol):
    def __call__(self, *, max_batch_size: int, max_sequence_length: int) -> Decoder:
        """An empty decoder for so many rows at most, each of so many tokens at most, padding included."""
