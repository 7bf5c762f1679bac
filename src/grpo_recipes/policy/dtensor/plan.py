"""Tensor and sequence parallelism from PyTorch's own building blocks.

Column-parallel projections into heads and MLP, row-parallel ones out of them, embedding and output layer cut along the
vocabulary (Shoeybi et al. 2019). With sequence parallelism the tokens between them are cut, too (Korthikanti et al.
2022). A block's input is made one DTensor before its projections, so that one reduction serves for all of them on the
way back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def parallelize(model: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut the parameters of a dense model of the supported families over a mesh of one dimension."""
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    outer: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        # Logits stay cut along the vocabulary: logprobs are computed from the parts.
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1)),
    }
    if sequence_parallel:
        outer["model.norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, outer)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, _layer(layer, between))
    if model.config.tie_word_embeddings:  # each was given a parameter of its own
        model.lm_head.weight = model.model.embed_tokens.weight


def _layer(layer, between: Placement) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if hasattr(layer.self_attn, "q_norm"):  # over heads [1, N, heads, D], of which a rank has its part
        for name in ("q_norm", "k_norm"):
            plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if between.is_shard():
        for name in ("input_layernorm", "post_attention_layernorm"):
            plan[name] = SequenceParallel(use_local_output=True)
    return plan
