"""Decoding with a key/value cache on a whole copy of the model on each rank: logits in, nothing sampled here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_recipes.policy.attention import KeyValueCache, pack
from grpo_recipes.policy.dtensor.attention import AttentionInputs
from grpo_recipes.policy.dtensor.model import empty_model, materialize
from grpo_recipes.policy.dtensor.weights import Weights
from grpo_recipes.policy.hf.folder import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_recipes.recipe.schema import PolicyConfig


class WholeModel:
    """The recipe's model, unsharded, in policy.precision, without gradients. It has no weights until `take`.

    Costs the memory of one whole copy of the parameters on every rank.
    """

    def __init__(self, policy: PolicyConfig, model_folder: Path, device: torch.device | str) -> None:
        hf = read_config(model_folder, trust_remote_code=policy.trust_remote_code)
        dtype, self.device = getattr(torch, policy.precision), torch.device(device)
        self.model = empty_model(hf, dtype).requires_grad_(False)
        materialize(self.model, self.device, self.device)
        self._weights = Weights(self.model, dtype, self.device)

    def take(self, bucket: Mapping[str, Tensor]) -> None:
        """Full tensors by Hugging Face name, as `Policy.weight_buckets` yields them; all buckets make a refit."""
        self._weights.take(bucket)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that it computes with, by Hugging Face name."""
        return self._weights.held()

    def decoder(self, *, max_batch_size: int, max_sequence_length: int) -> Decoder:
        return Decoder(self.model, self.device, max_batch_size=max_batch_size, max_sequence_length=max_sequence_length)


class Decoder:
    """A cache for one batch of prompts. Shares the model's weights: what `take` changes, the next step sees.

    `prefill` once, then `step` once per token; a further `prefill` forgets everything before it.

    Args:
        max_batch_size: most rows of a `prefill`.
        max_sequence_length: most tokens of a row, padding, prompt and generated tokens together.
    """

    def __init__(
        self, model: PreTrainedModel, device: torch.device, *, max_batch_size: int, max_sequence_length: int
    ) -> None:
        self._model, self._device = model, device
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.cache: KeyValueCache | None = None

    def prefill(self, token_ids_BT: Tensor, pad_lengths_B: Tensor) -> Tensor:
        """Read the prompts.

        Args:
            token_ids_BT: int64 [B, T], left-padded with any valid token id.
            pad_lengths_B: int64 [B], padding tokens at the left of each row; less than T.

        Returns:
            float32 [B, V], logits after the last prompt token, before temperature.
        """
        rows, width = token_ids_BT.shape
        if rows > self.max_batch_size or width > self.max_sequence_length:
            raise ValueError(f"{rows} x {width} tokens exceed {self.max_batch_size} x {self.max_sequence_length}")
        pads = pad_lengths_B.cpu()
        # Padding is dropped, not masked: the prompts run packed, as in training.
        real = torch.arange(width) >= pads[:, None]
        packing = pack(width - pads, self._device)
        self.cache = KeyValueCache(pads.to(self._device), self.max_sequence_length, width)
        ends = packing.cu_seqlens[1:].to(torch.int64) - 1
        inputs = AttentionInputs(packing, self.cache)
        return self._forward(token_ids_BT.cpu()[real].to(self._device), packing.positions, inputs, ends)

    def step(self, token_ids_B: Tensor) -> Tensor:
        """Append one token, int64 [B], to every row still held; returns float32 [B, V], the logits after it."""
        cache = self.cache
        assert cache is not None, "prefill first"
        if cache.length == cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens a row and is full")
        cache.length += 1
        inputs = AttentionInputs(None, cache, cache.visible)
        return self._forward(token_ids_B.to(self._device), cache.length - 1 - cache.pads, inputs, None)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [B'], indices into the rows held now), in this order."""
        assert self.cache is not None, "prefill first"
        self.cache.select(rows.to(self._device))

    @torch.no_grad()
    def _forward(self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, wanted: Tensor | None) -> Tensor:
        """Logits of the wanted tokens, or of all."""
        found = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if wanted is None else wanted,
            attention_inputs=inputs,
        )
        logits: Tensor = found.logits[0].float()
        return logits
