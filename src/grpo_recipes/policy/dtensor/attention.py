"""The project's packed and cached attention as transformers' models call it, under the name NAME."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from grpo_recipes.policy.attention import KeyValueCache, Packing, cached_attention, packed_attention

NAME = "grpo_recipes_packed"


@dataclass
class AttentionInputs:
    """What one forward pass tells every layer; travels as the keyword `attention_inputs` of a model's forward."""

    packing: Packing | None  # None: decoding, a row of one token each
    cache: KeyValueCache | None = None
    visible: Tensor | None = None  # bool [B, 1, 1, K] while decoding


# Lengths differ from microbatch to microbatch: compiled code would be made anew for each.
@torch.compiler.disable
def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention_inputs: AttentionInputs,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, G, N, D], positions already rotated; returns [1, N, H, D]."""
    inputs = attention_inputs
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if inputs.packing is None:
        assert inputs.cache is not None and inputs.visible is not None
        keys, values = inputs.cache.append(module.layer_idx, key, value)
        return cached_attention(query.contiguous(), keys, values, inputs.visible, scaling)[None], None
    if inputs.cache is not None:
        inputs.cache.fill(module.layer_idx, key, value, inputs.packing)
    return packed_attention(query, key, value, inputs.packing, scaling)[None], None


AttentionInterface.register(NAME, attend)
