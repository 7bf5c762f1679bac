"""Hugging Face weights into and out of a Megatron model, whatever its parallel layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from grpo_recipes.errors import UserError
from grpo_recipes.policy.contract import WeightSpec
from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.folder import TensorSource
from grpo_recipes.policy.hf.mapping import Heads, Rule, merge, shard, split, unshard

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig

    from grpo_recipes.policy.megatron.model import BuiltModel

BUCKET_BYTES = 256 * 2**20
# TransformerEngine's layers hold the norm before a linear layer inside it.
TE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True)
class Placed:
    """A parameter of this rank and the rule that fills it."""

    rule: Rule
    parameter: torch.nn.Parameter
    is_copy: bool = False  # the last pipeline stage's copy of a tied embedding

    @property
    def cut_along(self) -> int | None:
        """Dimension cut for tensor parallelism, None for a whole copy on every rank."""
        return self.parameter.partition_dim if getattr(self.parameter, "tensor_model_parallel", False) else None


class WeightMap:
    """Pairs every parameter of one pipeline stage with its Hugging Face tensors.

    Raises UserError for a parameter that the family's table does not name.
    """

    def __init__(self, built: BuiltModel, hf: PretrainedConfig, family: Family) -> None:
        config = built.config
        self.tied = hf.tie_word_embeddings
        self.heads = Heads(config.num_attention_heads, config.num_query_groups, config.kv_channels)
        self.vocab_size, self.dtype = built.vocab_size, config.params_dtype
        self.tp = config.tensor_model_parallel_size
        self.num_layers = config.num_layers
        self.rules = list(_all_rules(family, config.num_layers, self.tied))
        by_name = {rule.megatron: rule for rule in self.rules}
        if self.tied:
            by_name[OUTPUT] = Rule(OUTPUT, by_name[EMBEDDING].hf, "vocab")
        self.placed: dict[str, Placed] = {}
        for chunk, name, parameter in ((c, *item) for c in built.chunks for item in c.named_parameters()):
            whole_name = _whole_model_name(name, chunk)
            if whole_name not in by_name:
                raise UserError(f"no Hugging Face name is known for {whole_name}", where=f"family {family.model_type}")
            self.placed[whole_name] = Placed(by_name[whole_name], parameter, self.tied and whole_name == OUTPUT)

    def _whole_shape(self, placed: Placed) -> tuple[int, ...]:
        shape = list(placed.parameter.shape)
        if placed.cut_along is not None:
            shape[placed.cut_along] *= self.tp
        return tuple(shape)

    def _hf_shapes(self, placed: Placed) -> list[tuple[int, ...]]:
        whole = torch.empty(self._whole_shape(placed), device="meta")
        return [tuple(part.shape) for part in split(placed.rule.kind, whole, self.heads, self.vocab_size)]

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Fill this rank's parameters, one at a time. Raises UserError for missing, misshapen or unknown tensors."""
        rank = parallel_state.get_tensor_model_parallel_rank()
        for placed in self.placed.values():
            rule = placed.rule
            parts = [source.get(n, s) for n, s in zip(rule.hf, self._hf_shapes(placed), strict=True)]
            whole = merge(rule.kind, parts, self.heads, self._whole_shape(placed)[0])
            if placed.cut_along is not None:
                whole = shard(rule.kind, whole, placed.cut_along, rank, self.tp)
            placed.parameter.copy_(whole)
        if source.names is not None:
            self._refuse_unknown(source.names)

    def _refuse_unknown(self, names: frozenset[str]) -> None:
        known = {name for rule in self.rules for name in rule.hf}
        unknown = {n for n in names - known if not n.endswith("rotary_emb.inv_freq")}
        if self.tied:
            unknown.discard("lm_head.weight")
        if unknown:
            first = sorted(unknown)[0]
            raise UserError(
                f"{len(unknown)} tensors belong to nothing in the model, such as {first}", where="model folder"
            )

    def plan(self) -> list[WeightSpec]:
        """Static; equal on every rank, from shapes alone once `gather_plan` has run on all."""
        return self._plan

    def gather_plan(self) -> None:
        """Collective. Fixes the order (that of the family's table), the owners and the buckets."""
        rank = dist.get_rank()
        mine = {name: (rank, self._hf_shapes(placed)) for name, placed in self.placed.items()}
        everyone: list[dict] = [None] * dist.get_world_size()  # type: ignore[list-item]
        dist.all_gather_object(everyone, mine)
        self._plan: list[WeightSpec] = []
        bucket = filled = 0
        for rule in self.rules:
            owners = tuple(found[rule.megatron][0] for found in everyone if rule.megatron in found)
            shapes = next(found[rule.megatron][1] for found in everyone if rule.megatron in found)
            size = sum(torch.Size(s).numel() for s in shapes) * self.dtype.itemsize
            if filled and filled + size > BUCKET_BYTES:
                bucket, filled = bucket + 1, 0
            filled += size
            self._plan += [WeightSpec(n, s, self.dtype, owners, bucket) for n, s in zip(rule.hf, shapes, strict=True)]

    @torch.no_grad()
    def buckets(self) -> Iterator[dict[str, Tensor]]:
        """Collective. Full tensors, some of them views of the live parameters: copy what is to be kept."""
        by_hf_name = {rule.hf[0]: rule for rule in self.rules}
        bucket: dict[str, Tensor] = {}
        number = 0
        for spec in self._plan:
            if spec.bucket != number:
                yield bucket
                bucket, number = {}, spec.bucket
            if spec.name in by_hf_name:
                bucket.update(self._whole(by_hf_name[spec.name], spec))
        yield bucket

    def _whole(self, rule: Rule, spec: WeightSpec) -> dict[str, Tensor]:
        placed = self.placed.get(rule.megatron)
        whole = None
        if placed is not None:
            whole = placed.parameter.detach()
            if placed.cut_along is not None and self.tp > 1:
                parts = [torch.empty_like(whole) for _ in range(self.tp)]
                dist.all_gather(parts, whole.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
                whole = unshard(rule.kind, parts, placed.cut_along)
        tensors = None if whole is None else split(rule.kind, whole, self.heads, self.vocab_size)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            tensors = self._from_stage(rule, spec, tensors)
        return dict(zip(rule.hf, tensors, strict=True))

    def _from_stage(self, rule: Rule, spec: WeightSpec, tensors: Sequence[Tensor] | None) -> list[Tensor]:
        group = parallel_state.get_pipeline_model_parallel_group()
        owner = next(rank for rank in dist.get_process_group_ranks(group) if rank in spec.owner)
        shapes = {s.name: s.shape for s in self._plan}
        device = next(iter(self.placed.values())).parameter.device
        result = []
        for i, name in enumerate(rule.hf):
            tensor = (
                tensors[i].contiguous()
                if tensors is not None
                else torch.empty(shapes[name], dtype=self.dtype, device=device)
            )
            dist.broadcast(tensor, owner, group=group)
            result.append(tensor)
        return result


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def _all_rules(family: Family, num_layers: int, tied: bool) -> Iterator[Rule]:
    """In the order in which a forward pass meets them."""
    first, *last = family.outer
    yield first
    for layer in range(num_layers):
        for rule in family.layer:
            yield Rule(
                f"decoder.layers.{layer}.{rule.megatron}",
                tuple(f"model.layers.{layer}.{name}" for name in rule.hf),
                rule.kind,
            )
    for rule in last:
        if not (tied and rule.megatron == OUTPUT):
            yield rule


def _whole_model_name(name: str, chunk: GPTModel) -> str:
    """Layer indices of this chunk -> indices in the whole model; TransformerEngine's names -> the local spec's."""
    if not name.startswith("decoder.layers."):
        return name
    _, _, index, rest = name.split(".", 3)
    number = chunk.decoder.layers[int(index)].layer_number - 1
    return f"decoder.layers.{number}.{TE_NAMES.get(rest, rest)}"
