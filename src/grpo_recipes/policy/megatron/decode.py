"""Decoding with a key/value cache on a Megatron GPTModel: logits in, nothing sampled here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Decoder:
    """A cache for one batch of prompts. Shares the model's weights: what `train` changes, the next step sees.

    One use: `prefill` once, then `step` once per token; a further `prefill` forgets everything before it.
    Runs without gradients and in evaluation mode, and leaves the model as it found it.

    Args:
        model: the GPTModel (`MegatronPolicy.decoder` passes its own).
        max_batch_size: most rows of a `prefill`.
        max_sequence_length: most tokens of a row, padding, prompt and generated tokens together.
    """

    def __init__(self, model, *, max_batch_size: int, max_sequence_length: int) -> None:
        raise RuntimeError("not written yet")

    def prefill(self, token_ids_BT: Tensor, pad_lengths_B: Tensor) -> Tensor:
        """Read the prompts.

        Args:
            token_ids_BT: int64 [B, T], left-padded with any valid token id.
            pad_lengths_B: int64 [B], padding tokens at the left of each row; less than T.

        Returns:
            float32 [B, V], logits after the last prompt token, before temperature; V without vocabulary padding.
        """

    def step(self, token_ids_B: Tensor) -> Tensor:
        """Append one token, int64 [B], to every row still held; returns float32 [B, V], the logits after it."""

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [B'], indices into the rows held now), in this order."""
