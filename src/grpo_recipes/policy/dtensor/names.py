"""From a parameter of transformers' model in memory to the tensors of a published checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from grpo_recipes.recipe.architecture import number_of_experts


class Piece(NamedTuple):
    """A published tensor and the part of a parameter that it is."""

    name: str
    of: Callable[[Tensor], Tensor]  # a view


# model_type -> the published names of the block, of gate, up and down. In memory the experts of a layer are two tensors:
# gate_up_proj [experts, 2 * rows, columns], gate above up, and down_proj [experts, rows, columns].
_EXPERTS = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
_OF_EXPERTS = re.compile(r"(model\.layers\.\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)")


def experts_of(config: Mapping[str, Any]) -> int:
    """Experts of a layer in a model's configuration; 0 in a dense model."""
    return number_of_experts(config) if "num_experts_per_tok" in config else 0


def pieces(model_type: str, name: str, experts: int) -> Iterator[Piece]:
    """What a parameter is made of, in order. Everything but a layer of experts is one published tensor."""
    match = _OF_EXPERTS.fullmatch(name) if experts else None
    if match is None:
        yield Piece(name, lambda whole: whole)
        return
    block, gate, up, down = _EXPERTS[model_type]
    prefix, kind = f"{match[1]}.{block}", match[2]
    if kind == "gate.weight":
        yield Piece(f"{prefix}.gate.weight", lambda whole: whole)
        return
    for expert in range(experts):
        if kind == "experts.down_proj":
            yield Piece(f"{prefix}.experts.{expert}.{down}.weight", lambda whole, e=expert: whole[e])
        else:
            for half, part in enumerate((gate, up)):
                yield Piece(
                    f"{prefix}.experts.{expert}.{part}.weight",
                    lambda whole, e=expert, h=half: whole[e].chunk(2)[h],
                )
