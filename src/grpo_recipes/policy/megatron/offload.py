"""What of Megatron's memory is weights, gradients and the optimizer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from grpo_recipes.policy.megatron.optimizer import distributed_optimizers
from grpo_recipes.policy.megatron.optimizer_state import OptimizerState
from grpo_recipes.policy.trainer_memory import TrainerMemory

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer


def memory_of(model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> TrainerMemory:
    def weights() -> Iterator[Tensor]:
        for chunk in model:
            yield from chunk.parameters()

    def gradients() -> Iterator[Tensor]:
        for chunk in model:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                yield buffer.grad_data

    def of_optimizer() -> Iterator[Tensor]:
        for part in distributed_optimizers(optimizer):
            for adam in OptimizerState(part).adams:
                for group in adam.param_groups:
                    yield from group["params"]
                for state in adam.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))

    def drop_gradients() -> None:
        optimizer.zero_grad(set_to_none=True)

    return TrainerMemory(next(model[0].parameters()).device, weights, of_optimizer, gradients, drop_gradients)
