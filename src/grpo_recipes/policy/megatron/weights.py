"""Hugging Face weights into and out of a Megatron model, whatever its parallel layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_recipes.errors import UserError
from grpo_recipes.policy.buckets import in_buckets
from grpo_recipes.policy.contract import WeightSpec
from grpo_recipes.policy.hf.families import Family
from grpo_recipes.policy.hf.folder import BUFFERS, TensorSource
from grpo_recipes.policy.hf.mapping import Heads, Rule, merge, shard, split, unshard

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig

    from grpo_recipes.policy.megatron.model import BuiltModel

BUCKET_BYTES = 256 * 2**20
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# TransformerEngine's layers hold the norm before a linear layer inside it.
TE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# One module per expert, and TransformerEngine's grouped linear layers; experts are counted within their rank.
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")


Shapes = tuple[tuple[int, ...], ...]  # of the Hugging Face tensors of one rule


@dataclass(frozen=True)
class Home:
    """Where a parameter lives: ranks in the pipeline and in the expert parallel group."""

    stage: int
    expert_rank: int


@dataclass(frozen=True)
class Placed:
    """A parameter of this rank and the rule that fills it."""

    rule: Rule
    parameter: torch.nn.Parameter
    cut_group: dist.ProcessGroup  # the ranks among which the parameter is cut, if it is cut
    is_copy: bool = False  # the last pipeline stage's copy of a tied embedding

    @property
    def cut_along(self) -> int | None:
        """Dimension cut for tensor parallelism, None for a whole copy on every rank."""
        return self.parameter.partition_dim if getattr(self.parameter, "tensor_model_parallel", False) else None

    @property
    def parts(self) -> int:
        """In how many the parameter is cut."""
        return 1 if self.cut_along is None else self.cut_group.size()


class WeightMap:
    """Pairs every parameter of one rank with its Hugging Face tensors.

    Raises UserError for a parameter that the family's table does not name.
    """

    def __init__(self, built: BuiltModel, hf: PretrainedConfig, family: Family) -> None:
        config = built.config
        self.tied = hf.tie_word_embeddings
        self.heads = Heads(config.num_attention_heads, config.num_query_groups, config.kv_channels)
        self.vocab_size, self.dtype = built.vocab_size, config.params_dtype
        self.device = next(built.chunks[0].parameters()).device
        experts = config.num_moe_experts or 0
        self.rules = list(all_rules(family, config.num_layers, experts, self.tied))
        by_name = {rule.megatron: rule for rule in self.rules}
        if self.tied:
            by_name[OUTPUT] = Rule(OUTPUT, by_name[EMBEDDING].hf, "vocab")
        self.groups = groups = built.chunks[0].pg_collection
        first_expert = groups.ep.rank() * (experts // groups.ep.size())
        self.placed: dict[str, Placed] = {}
        for chunk, name, parameter in ((c, *item) for c in built.chunks for item in c.named_parameters()):
            whole_name = whole_model_name(name, chunk, first_expert)
            if whole_name not in by_name:
                raise UserError(f"no Hugging Face name is known for {whole_name}", where=f"family {family.model_type}")
            # Experts are laid out by expert parallelism and cut by expert tensor parallelism.
            cut_group = groups.expt_tp if ".mlp.experts." in whole_name else groups.tp
            is_copy = self.tied and whole_name == OUTPUT
            self.placed[whole_name] = Placed(by_name[whole_name], parameter, cut_group, is_copy)

    def _whole_shape(self, placed: Placed) -> tuple[int, ...]:
        shape = list(placed.parameter.shape)
        if placed.cut_along is not None:
            shape[placed.cut_along] *= placed.parts
        return tuple(shape)

    def _hf_shapes(self, placed: Placed) -> Shapes:
        whole = torch.empty(self._whole_shape(placed), device="meta")
        return tuple(tuple(part.shape) for part in split(placed.rule.kind, whole, self.heads, self.vocab_size))

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Fill this rank's parameters, one at a time. Raises UserError for missing, misshapen or unknown tensors."""
        for placed in self.placed.values():
            rule = placed.rule
            parts = [source.get(n, s) for n, s in zip(rule.hf, self._hf_shapes(placed), strict=True)]
            self._fill(placed, parts)
        if source.names is not None:
            self._refuse_unknown(source.names)

    @torch.no_grad()
    def take(self, bucket: Mapping[str, Tensor]) -> None:
        """Fill the parameters whose Hugging Face tensors are in a bucket: the plan never splits those of one."""
        for placed in self.placed.values():
            if placed.rule.hf[0] in bucket:
                self._fill(placed, [bucket[name] for name in placed.rule.hf])

    def _fill(self, placed: Placed, parts: Sequence[Tensor]) -> None:
        kind = placed.rule.kind
        whole = merge(kind, parts, self.heads, self._whole_shape(placed)[0])
        if placed.cut_along is not None:
            whole = shard(kind, whole, placed.cut_along, placed.cut_group.rank(), placed.parts)
        placed.parameter.copy_(whole)

    def _refuse_unknown(self, names: frozenset[str]) -> None:
        known = {name for rule in self.rules for name in rule.hf}
        unknown = {n for n in names - known if not n.endswith(BUFFERS)}
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
        number_of = {rule.megatron: number for number, rule in enumerate(self.rules)}
        same: dict[Shapes, Shapes] = {}  # one object for equal shapes, so that thousands of experts travel small
        held: dict[int, Shapes] = {}
        for name, placed in self.placed.items():
            if not placed.is_copy:
                shapes = self._hf_shapes(placed)
                held[number_of[name]] = same.setdefault(shapes, shapes)
        here = Home(self.groups.pp.rank(), self.groups.ep.rank())
        everyone: list[tuple[Home, dict[int, Shapes]]] = [(here, held)] * dist.get_world_size()
        dist.all_gather_object(everyone, (here, held))
        owners: list[list[int]] = [[] for _ in self.rules]
        shapes_of: dict[int, Shapes] = {}
        self._homes: dict[int, Home] = {}
        for rank, (home, found) in enumerate(everyone):
            shapes_of |= found
            for number in found:
                owners[number].append(rank)
                self._homes[number] = home
        self._plan: list[WeightSpec] = []
        bucket = filled = 0
        for number, rule in enumerate(self.rules):
            shapes = shapes_of[number]
            size = sum(torch.Size(s).numel() for s in shapes) * self.dtype.itemsize
            if filled and filled + size > BUCKET_BYTES:
                bucket, filled = bucket + 1, 0
            filled += size
            holders = tuple(owners[number])
            self._plan += [WeightSpec(n, s, self.dtype, holders, bucket) for n, s in zip(rule.hf, shapes, strict=True)]

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        """Collective. Full tensors, some of them views of the live parameters: copy what is to be kept."""
        return in_buckets(self._plan, self.gather())

    @torch.no_grad()
    def gather(
        self, of: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Collective. Hugging Face name and full tensor on every rank, in the plan's order, one parameter of the model
        at a time.

        Args:
            of: what to gather for a parameter: a tensor of its shape on its device, such as its gradient. Left out,
                the parameter itself; some results are then views of it: copy what is to be kept.
            dtype: of what `of` returns; left out, that of the parameters.
        """
        plan = iter(self._plan)
        stage = self.groups.pp.rank()
        for number, rule in enumerate(self.rules):
            shapes = [next(plan).shape for _ in rule.hf]
            home, placed = self._homes[number], self.placed.get(rule.megatron)
            tensors = None if placed is None else self._whole(placed, of)
            if stage == home.stage and ".experts." in rule.megatron:
                tensors = self._spread(tensors, shapes, dtype, self.groups.ep, home.expert_rank)
            yield from zip(rule.hf, self._spread(tensors, shapes, dtype, self.groups.pp, home.stage), strict=True)

    @torch.no_grad()
    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and tensor of a model that is whole on this rank. Not collective."""
        for placed in self.placed.values():
            if not placed.is_copy:
                yield from zip(placed.rule.hf, self._whole(placed, torch.Tensor.detach), strict=True)

    def _whole(self, placed: Placed, of: Callable[[torch.nn.Parameter], Tensor]) -> list[Tensor]:
        """The Hugging Face tensors of a parameter that this rank holds a part of."""
        whole = of(placed.parameter)
        if placed.parts > 1:
            parts = [torch.empty_like(whole) for _ in range(placed.parts)]
            dist.all_gather(parts, whole.contiguous(), group=placed.cut_group)
            whole = unshard(placed.rule.kind, parts, placed.cut_along)
        return split(placed.rule.kind, whole, self.heads, self.vocab_size)

    def _spread(
        self,
        tensors: Sequence[Tensor] | None,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None,
        group: dist.ProcessGroup,
        source: int,
    ) -> Sequence[Tensor]:
        """From the `source`-th rank of a group to all of it."""
        if group.size() == 1:
            return tensors
        if tensors is None:
            tensors = [torch.empty(shape, dtype=dtype or self.dtype, device=self.device) for shape in shapes]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=source)
        return tensors


def all_rules(family: Family, num_layers: int, num_experts: int, tied: bool) -> Iterator[Rule]:
    """In the order in which a forward pass meets them."""
    first, *last = family.outer
    yield first
    for layer in range(num_layers):
        for rule in family.layer:
            for expert in range(num_experts) if "{expert}" in rule.megatron else (None,):
                yield Rule(
                    f"decoder.layers.{layer}.{rule.megatron.format(expert=expert)}",
                    tuple(f"model.layers.{layer}.{name.format(expert=expert)}" for name in rule.hf),
                    rule.kind,
                )
    for rule in last:
        if not (tied and rule.megatron == OUTPUT):
            yield rule


def whole_model_name(name: str, chunk: GPTModel, first_expert: int) -> str:
    """Indices of layers and experts on this rank -> in the whole model; TransformerEngine's names -> the local spec's."""
    if not name.startswith("decoder.layers."):
        return name
    _, _, index, rest = name.split(".", 3)
    number = chunk.decoder.layers[int(index)].layer_number - 1
    rest = GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1.weight", TE_NAMES.get(rest, rest))
    expert = EXPERT.fullmatch(rest)
    if expert:
        rest = f"mlp.experts.local_experts.{first_expert + int(expert[1])}.{expert[2]}.weight"
    return f"decoder.layers.{number}.{rest}"
