"""A copy of the whole model on one rank, to sample from where the trainer's model is split over several ranks or
computes in fewer bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from grpo_recipes.policy.hf.families import family_of
from grpo_recipes.policy.hf.folder import read_config
from grpo_recipes.policy.megatron.decode import Decoder
from grpo_recipes.policy.megatron.model import build_model
from grpo_recipes.policy.megatron.weights import WeightMap
from grpo_recipes.recipe.megatron import given_fields

if TYPE_CHECKING:
    from grpo_recipes.recipe.schema import MegatronConfig, PolicyConfig

SIZES = tuple(f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model"))
# Fields that a recipe can set (recipe/megatron_limits.py) and that speak of how a model is split and trained, not of
# what it computes. Some demand a split.
OF_A_SPLIT_MODEL = (
    *SIZES,
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "activation_checkpointing",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "overlap_p2p_comm",
    "overlap_p2p_comm_warmup_flush",
    "batch_p2p_comm",
    "cp_comm_type",
    "moe_token_dispatcher_type",
)
# TransformerEngine multiplies in 8 or 4 bits for multiples of 16 or 32 tokens only, and goes on with its own copies of
# the weights until a microbatch is said to be a first one: a sampler would fail, or draw by old weights.
LOW_PRECISION = ("fp8", "fp4")
OF_LOW_PRECISION = (
    *LOW_PRECISION,
    "fp8_output_proj",
    "first_last_layers_bf16",
    "moe_router_padding_for_quantization",
    "moe_router_padding_for_fp8",
)


class WholeModel:
    """The recipe's model, unsplit, in policy.precision, without gradients and without an optimizer. It has no weights
    until `take`.

    Costs the memory of one whole copy of the parameters on every rank; nothing larger than a bucket besides.
    """

    def __init__(self, policy: PolicyConfig, model_folder: Path) -> None:
        hf = read_config(model_folder, trust_remote_code=policy.trust_remote_code)
        family = family_of(hf)
        unsplit = policy.model_copy(update={"megatron_cfg": for_sampling(policy.megatron_cfg)})
        self.built = build_model(hf, family, unsplit, groups_of_one())
        for chunk in self.built.chunks:
            chunk.requires_grad_(False).eval()
        self.weights = WeightMap(self.built, hf, family)

    def take(self, bucket: Mapping[str, Tensor]) -> None:
        """Full tensors by Hugging Face name, as `Policy.weight_buckets` yields them; all buckets make a refit."""
        self.weights.take(bucket)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that it computes with, by Hugging Face name."""
        return self.weights.held()

    def decoder(self, *, max_batch_size: int, max_sequence_length: int) -> Decoder:
        return Decoder(self.built, max_batch_size=max_batch_size, max_sequence_length=max_sequence_length)


def needs_copy(megatron: MegatronConfig) -> bool:
    """Whether a rank of the trainer holds, or computes, less than the whole model, or in fewer bits than a sampler can."""
    given = given_fields(megatron)
    return any(getattr(megatron, size) > 1 for size in (*SIZES, "expert_tensor_parallel_size")) or any(
        given.get(name) for name in LOW_PRECISION
    )


def for_sampling(megatron: MegatronConfig) -> MegatronConfig:
    """The same model, on one rank and in policy.precision."""
    left_out = {*OF_A_SPLIT_MODEL, *OF_LOW_PRECISION}
    return type(megatron).model_validate(megatron.model_dump(exclude_unset=True, exclude=left_out))


def groups_of_one() -> ProcessGroupCollection:
    """Every group is this rank alone. Not collective."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return ProcessGroupCollection(**{f.name: alone for f in fields(ProcessGroupCollection) if f.name != "hcp"})
