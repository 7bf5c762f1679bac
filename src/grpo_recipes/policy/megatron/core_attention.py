"""The attention that Megatron's layers call: rotary positions, then packed or cached attention.

RoPE is applied here rather than by Megatron, for three reasons: Megatron's packed path loops over sequences in Python
(rope_utils._apply_rotary_pos_emb_thd), its decoding rotates the whole key cache again for every token
(Attention._adjust_key_value_for_inference), and its Llama 3 scaling knows one set of constants only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from grpo_recipes.policy.attention import (
    KeyValueCache,
    Packing,
    Rotary,
    cached_attention,
    kernel_name,
    pack,
    packed_attention,
    rotate,
)
from grpo_recipes.policy.context_parallel import ContextShard


@dataclass
class AttentionInputs(PackedSeqParams):
    """What one forward pass tells every layer; travels in Megatron's packed_seq_params (qkv_format thd)."""

    cos: Tensor = field(kw_only=True)  # [N, 1, D] for the N tokens held here, model dtype
    sin: Tensor = field(kw_only=True)
    packing: Packing | None = None  # None: decoding, T rows of one token each
    cache: KeyValueCache | None = None
    visible: Tensor | None = None  # bool [T, 1, 1, K] while decoding


def packed_inputs(
    lengths: Tensor,
    rotary: Rotary,
    dtype: torch.dtype,
    cache: KeyValueCache | None = None,
    context: ContextShard | None = None,
) -> AttentionInputs:
    """For T packed tokens of S sequences; lengths int64 [S] on the CPU."""
    packing = pack(lengths, rotary.inverse_frequencies.device, context)
    cos, sin = rotary.at(packing.positions, dtype)
    cu, longest = packing.cu_seqlens, packing.max_length
    return AttentionInputs(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=cos,
        sin=sin,
        packing=packing,
        cache=cache,
    )


def decoding_inputs(cache: KeyValueCache, rotary: Rotary, dtype: torch.dtype) -> AttentionInputs:
    """For one token of each row in the last slot of the cache; positions are those of the unpadded sequences."""
    cos, sin = rotary.at(cache.length - 1 - cache.pads, dtype)
    return AttentionInputs(qkv_format="thd", cos=cos, sin=sin, cache=cache, visible=cache.visible)


class CoreAttention(MegatronModule):
    """Built by Megatron's SelfAttention from the layer spec."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: AttentionInputs | None = None,
    ) -> Tensor:
        """query [N, H, D]; key, value [N, G, D]; returns [N, H * D]."""
        inputs = packed_seq_params
        query, key = rotate(query, inputs.cos, inputs.sin), rotate(key, inputs.cos, inputs.sin)
        if inputs.packing is None:
            keys, values = inputs.cache.append(self.layer_number, key, value)
            return cached_attention(query, keys, values, inputs.visible, self.scale).flatten(1)
        if inputs.cache is not None:
            inputs.cache.fill(self.layer_number, key, value, inputs.packing)
        return self.attend(query, key, value, inputs).flatten(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: AttentionInputs) -> Tensor:
        return packed_attention(query, key, value, inputs.packing, self.scale)

    def kernel_name(self) -> str:
        """For the manifest."""
        return kernel_name(self.config.params_dtype)


class TECoreAttention(CoreAttention):
    """As CoreAttention, with TransformerEngine's kernels for packed sequences. Needs CUDA and half precision."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs) -> None:
        super().__init__(config, layer_number, attn_mask_type, attention_type, **kwargs)
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.te = TEDotProductAttention(config, layer_number, attn_mask_type, attention_type, **kwargs)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: AttentionInputs) -> Tensor:
        from megatron.core.transformer.enums import AttnMaskType

        # TransformerEngine passes on whatever fields it finds, so it is given Megatron's own and no more.
        plain = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=inputs.cu_seqlens_q,
            cu_seqlens_kv=inputs.cu_seqlens_kv,
            max_seqlen_q=inputs.max_seqlen_q,
            max_seqlen_kv=inputs.max_seqlen_kv,
        )
        return self.te(query, key, value, None, AttnMaskType.padding_causal, packed_seq_params=plain)

    def kernel_name(self) -> str:
        return "transformer_engine"
