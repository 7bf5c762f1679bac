"""What a trainer does before and after a pass over a microbatch, whatever library runs the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_recipes.policy.attention import Packing
from grpo_recipes.policy.context_parallel import gather_outputs
from grpo_recipes.policy.contract import Batch, LossOutputs
from grpo_recipes.policy.padding import Padded


def per_real_token(output: Tensor, padded: Padded, packing: Packing) -> Tensor:
    """[2, N] of what each token held here says of the token after it -> [2, T] of the real tokens of the microbatch, each
    with what the token before it said; 0 at the first token of a sequence, which was predicted by nothing."""
    if packing.context is not None:
        output = gather_outputs(output, packing.natural, packing.context.group)
    first = padded.first.to(output.device, non_blocking=True)
    aligned = output.roll(1, -1).masked_fill(first, 0.0)
    return aligned if padded.real is None else aligned[:, padded.real.to(output.device, non_blocking=True)]


def on_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{n: v.to(device, non_blocking=True) for n, v in values.items() if v is not None})


def combine(
    outputs: Sequence[LossOutputs], group: dist.ProcessGroup | None
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Loss, sums and maxima over microbatches and the data-parallel ranks of a group; float64."""
    loss, sums, maxima = 0.0, dict[str, float](), dict[str, float]()
    for found in outputs:
        scalars = [found.loss.detach(), *found.sums.values(), *found.maxima.values()]
        values = torch.stack([s.to(torch.float64) for s in scalars]).tolist()  # one transfer from the device
        loss += values[0]
        for name, value in zip(found.sums, values[1:], strict=False):
            sums[name] = sums.get(name, 0.0) + value
        for name, value in zip(found.maxima, values[1 + len(found.sums) :], strict=True):
            maxima[name] = max(maxima.get(name, -math.inf), value)
    if group is None:
        return loss, sums, maxima
    everyone: list[tuple[float, dict[str, float], dict[str, float]]] = [(loss, sums, maxima)] * group.size()
    dist.all_gather_object(everyone, (loss, sums, maxima), group=group)
    return (
        sum(part[0] for part in everyone),
        {name: sum(part[1][name] for part in everyone) for name in sums},
        {name: max(part[2][name] for part in everyone) for name in maxima},
    )
