"""The parameters that vLLM computes with, sliced back to Hugging Face names, against what its loader was handed.

vLLM joins tensors (qkv_proj, gate_up_proj, an expert's w13 and w2) and cuts them for tensor parallelism. The part of a
handed tensor that this worker should hold is summed before it is loaded, and the same part of the live parameter after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_recipes.generation.sync.checksum import Checksums

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """live: the tensor, looked up anew each time. cut: what this worker holds of the whole tensor."""

    live: Callable[[], Tensor]
    cut: Callable[[Tensor], Tensor]


class LiveParameters:
    def __init__(self, model: torch.nn.Module) -> None:
        """Before loading begins: while it lasts, vLLM's layers hold no tensors."""
        self._parts = dict(parts_of(model))
        self._kinds = {name: _kind(part.live()) for name, part in self._parts.items()}
        self._handed: set[str] = set()
        self._expected = Checksums()

    def expect(self, name: str, tensor: Tensor) -> None:
        """A tensor is about to be handed to the loader."""
        self._handed.add(name)
        part = self._parts.get(name)
        if part is None:
            return
        held = part.cut(tensor)
        if _kind(held) == self._kinds[name]:  # else it is packed away, or kept in another type
            self._expected.add(name, held)

    def compare(self) -> tuple[list[str], list[str]]:
        """Names of live parameters that are not what was handed; names of what cannot be looked at."""
        expected, live = self._expected.result(), Checksums()
        for name in expected:
            live.add(name, self._parts[name].live())
        found = live.result()
        return [name for name in expected if found[name] != expected[name]], sorted(self._handed - expected.keys())


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def parts_of(model: torch.nn.Module) -> Iterator[tuple[str, Part]]:
    """By Hugging Face name."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for path, module in model.named_modules():
        prefix = path.rpartition(".")[0]
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if isinstance(module, QKVParallelLinear):
            yield from _joined(module, prefix, _qkv_rows(module), names)
        elif isinstance(module, MergedColumnParallelLinear):
            sizes = module.output_partition_sizes
            halves = [(name, size, module.tp_rank) for name, size in zip(("gate_proj", "up_proj"), sizes, strict=False)]
            if path.endswith(".gate_up_proj"):
                yield from _joined(module, prefix, halves, names)
        elif hasattr(module, "w13_weight") and hasattr(module, "w2_weight"):
            yield from _experts(module, prefix)
        elif isinstance(module, VocabParallelEmbedding):  # the output layer, too
            at = module.shard_indices
            rows = slice(at.org_vocab_start_index, at.org_vocab_end_index)
            for name in names:
                yield f"{path}.{name}", _rows(module, name, slice(0, at.num_org_elements), rows)
        elif isinstance(module, RowParallelLinear):
            size, rank = module.input_size_per_partition, module.tp_rank
            for name in names:
                yield f"{path}.{name}", _columns(module, name, slice(rank * size, (rank + 1) * size))
        elif isinstance(module, ColumnParallelLinear):
            size, rank = module.output_size_per_partition, module.tp_rank
            for name in names:
                yield f"{path}.{name}", _rows(module, name, slice(0, size), slice(rank * size, (rank + 1) * size))
        else:
            for name in names:
                yield f"{path}.{name}", _rows(module, name, slice(None), slice(None))


def _rows(module: Any, name: str, live: slice, whole: slice) -> Part:
    return Part(lambda: getattr(module, name).data[live], lambda tensor: tensor[whole])


def _columns(module: Any, name: str, columns: slice) -> Part:
    """A bias is not cut."""
    return Part(lambda: getattr(module, name).data, lambda tensor: tensor if tensor.ndim == 1 else tensor[:, columns])


def _qkv_rows(module: Any) -> list[tuple[str, int, int]]:
    """Name, rows of this worker, and which of the parts of that size it holds: key-value heads may be copies."""
    key_value_rank = module.tp_rank // module.num_kv_head_replicas
    return [
        ("q_proj", module.num_heads * module.head_size, module.tp_rank),
        ("k_proj", module.num_kv_heads * module.head_size, key_value_rank),
        ("v_proj", module.num_kv_heads * module.v_head_size, key_value_rank),
    ]


def _joined(
    module: Any, prefix: str, parts: list[tuple[str, int, int]], names: list[str]
) -> Iterator[tuple[str, Part]]:
    start = 0
    for part, size, rank in parts:
        for name in names:
            live, whole = slice(start, start + size), slice(rank * size, (rank + 1) * size)
            yield f"{prefix}.{part}.{name}", _rows(module, name, live, whole)
        start += size


def _experts(module: Any, prefix: str) -> Iterator[tuple[str, Part]]:
    """w13 [E, 2 I, H] and w2 [E, H, I] of the experts of this worker, where the kernel leaves them as they were loaded."""
    backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    if backend is None or backend.name not in ("TRITON", "BATCHED_TRITON"):
        return
    while prefix.endswith("experts"):  # vLLM nests the module that holds the weights
        prefix = prefix.rpartition(".")[0]
    half, rank = module.w13_weight.shape[1] // 2, module.tp_rank
    mapping = getattr(module, "expert_map", None)
    numbers = range(module.w13_weight.shape[0]) if mapping is None else mapping.tolist()
    for expert, local in enumerate(numbers):
        if local < 0:
            continue
        cut = slice(rank * half, (rank + 1) * half)

        def first(at: int = local) -> Tensor:
            return module.w13_weight.data[at, :half]

        def second(at: int = local) -> Tensor:
            return module.w13_weight.data[at, half:]

        def down(at: int = local) -> Tensor:
            return module.w2_weight.data[at]

        def rows(tensor: Tensor, cut: slice = cut) -> Tensor:
            return tensor[cut]

        def columns(tensor: Tensor, cut: slice = cut) -> Tensor:
            return tensor[:, cut]

        for gate, up, out in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):  # Qwen3; Mixtral
            yield f"{prefix}.experts.{expert}.{gate}.weight", Part(first, rows)
            yield f"{prefix}.experts.{expert}.{up}.weight", Part(second, rows)
            yield f"{prefix}.experts.{expert}.{out}.weight", Part(down, columns)
