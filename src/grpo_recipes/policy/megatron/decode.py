"""Decoding with a key/value cache on a Megatron GPTModel: logits in, nothing sampled here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_recipes.policy.attention import KeyValueCache
from grpo_recipes.policy.megatron.core_attention import AttentionInputs, decoding_inputs, packed_inputs

if TYPE_CHECKING:
    from grpo_recipes.policy.megatron.model import BuiltModel


class Decoder:
    """A cache for one batch of prompts. Shares the model's weights: what `train` changes, the next step sees.

    `prefill` once, then `step` once per token; a further `prefill` forgets everything before it. Runs without gradients
    and leaves the model as it found it. With tensor parallelism every rank of a group makes the same calls.

    Args:
        model: `MegatronPolicy.decoder` and `WholeModel.decoder` pass their own.
        max_batch_size: most rows of a `prefill`.
        max_sequence_length: most tokens of a row, padding, prompt and generated tokens together.
    """

    def __init__(self, model: BuiltModel, *, max_batch_size: int, max_sequence_length: int) -> None:
        split = ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
        if model.config.sequence_parallel or any(getattr(model.config, size) > 1 for size in split):
            raise ValueError("rows are decoded on ranks that hold the whole model: see whole_model.py")
        if model.config.fp8 or model.config.fp4:
            raise ValueError("rows are decoded in the precision of the model: see whole_model.py")
        self.model = model
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.cache: KeyValueCache | None = None

    def prefill(self, token_ids_BT: Tensor, pad_lengths_B: Tensor) -> Tensor:
        """Read the prompts.

        Args:
            token_ids_BT: int64 [B, T], left-padded with any valid token id.
            pad_lengths_B: int64 [B], padding tokens at the left of each row; less than T.

        Returns:
            float32 [B, V], logits after the last prompt token, before temperature; V without vocabulary padding.
        """
        rows, width = token_ids_BT.shape
        if rows > self.max_batch_size or width > self.max_sequence_length:
            raise ValueError(f"{rows} x {width} tokens exceed {self.max_batch_size} x {self.max_sequence_length}")
        device = self.model.rotary.inverse_frequencies.device
        pads = pad_lengths_B.to(device)
        # Padding is dropped, not masked: the prompts run packed, as in training.
        real = torch.arange(width) >= pad_lengths_B.cpu()[:, None]
        self.cache = KeyValueCache(pads, self.max_sequence_length, width)
        inputs = packed_inputs(
            width - pad_lengths_B.cpu(), self.model.rotary, self.model.config.params_dtype, self.cache
        )
        return self._forward(token_ids_BT.cpu()[real].to(device), inputs, inputs.cu_seqlens_q[1:].to(torch.int64) - 1)

    def step(self, token_ids_B: Tensor) -> Tensor:
        """Append one token, int64 [B], to every row still held; returns float32 [B, V], the logits after it."""
        cache = self.cache
        if cache.length == cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens a row and is full")
        cache.length += 1
        inputs = decoding_inputs(cache, self.model.rotary, self.model.config.params_dtype)
        return self._forward(token_ids_B.to(cache.pads.device), inputs, None)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [B'], indices into the rows held now), in this order."""
        self.cache.select(rows.to(self.cache.pads.device))

    @torch.no_grad()
    def _forward(self, token_ids: Tensor, inputs: AttentionInputs, wanted: Tensor | None) -> Tensor:
        """Logits of the wanted tokens, or of all."""
        [module] = self.model.chunks
        was_training = module.training
        module.eval()

        def logits(*, hidden_states: Tensor, output_layer: Any, output_weight: Any, **_: Any) -> Tensor:
            if wanted is not None:
                hidden_states = hidden_states[wanted]
            return output_layer(hidden_states, weight=output_weight, runtime_gather_output=True)[0][:, 0]

        found = module(token_ids[None], None, None, packed_seq_params=inputs, output_processor=logits)
        module.train(was_training)
        return found[:, : self.model.vocab_size].float()
