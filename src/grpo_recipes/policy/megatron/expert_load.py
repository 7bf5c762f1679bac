"""How evenly a model's routers share tokens out among experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import Router
from torch import Tensor


class ExpertLoad:
    """Counts, from now on, the tokens of training passes that each expert of this rank's layers is chosen for.

    Recomputed layers count twice and, without sequence parallelism, every tensor-parallel rank counts the same tokens:
    shares come out the same.
    """

    def __init__(self, chunks: Sequence[GPTModel], layers: int, experts: int) -> None:
        device = next(chunks[0].parameters()).device
        self._counts = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                for module in layer.modules():
                    if isinstance(module, Router):
                        module.register_forward_hook(self._count(layer.layer_number - 1))

    def _count(self, layer: int) -> Any:
        def hook(module: torch.nn.Module, _inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
            if not module.training:
                return
            _, chosen = outputs  # bool [tokens, experts]
            self._counts[layer] += chosen.detach().sum(0)

        return hook

    def reset(self) -> None:
        self._counts.zero_()

    def shares(self) -> tuple[tuple[float, ...], ...]:
        """Collective. [layer][expert] tokens since `reset` over an even share of them: 1 for an even load, 0 for an
        expert that nothing was sent to; layers without experts are all zeros."""
        counts = self._counts.clone()
        dist.all_reduce(counts)
        total = counts.sum(1, keepdim=True)
        return tuple(map(tuple, (counts * counts.shape[1] / total.clamp(min=1)).tolist()))
