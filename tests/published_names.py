"""transformers holds the experts of a layer as two tensors in memory; published checkpoints hold them one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

# model_type -> the published names of the block, of gate, up and down
_NAMES = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
_FUSED = re.compile(r"(model\.layers\.\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)")


def published(model_type: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By published name what transformers names as in memory: parameters, or their gradients. Results are views.

    gate_up_proj is [experts, 2 * rows, columns], gate above up; down_proj [experts, rows, columns].
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name) if model_type in _NAMES else None
        if match is None:
            result[name] = tensor
            continue
        block, gate, up, down = _NAMES[model_type]
        prefix, kind = f"{match[1]}.{block}", match[2]
        if kind == "gate.weight":
            result[f"{prefix}.gate.weight"] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {gate: matrix.chunk(2)[0], up: matrix.chunk(2)[1]} if "gate_up" in kind else {down: matrix}
            result |= {f"{prefix}.experts.{expert}.{part}.weight": found for part, found in parts.items()}
    return result
