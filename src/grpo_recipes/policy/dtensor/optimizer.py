"""Adam over this rank's parts of the weights, which are float32 whatever the model computes in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from grpo_recipes.policy.dtensor.mesh import Mesh
from grpo_recipes.policy.dtensor.schedule import Schedule
from grpo_recipes.policy.dtensor.weights import local_part
from grpo_recipes.recipe.megatron import scheduler_arguments

if TYPE_CHECKING:
    from grpo_recipes.recipe.schema import PolicyConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """torch's Adam is given plain tensors that share memory with the local parts: it works element by element, and
    parameters of one and of two mesh dimensions need not be kept apart.

    Weight decay is for matrices: norms and biases, which have one dimension, are not decayed.

    Args:
        parameters: sharded, by name, with their final memory.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], policy: PolicyConfig, total_steps: int, mesh: Mesh
    ) -> None:
        given = policy.megatron_cfg.optimizer
        self.schedule = Schedule(**scheduler_arguments(policy.megatron_cfg, total_steps))
        self.steps = 0  # taken, which is what the schedule counts
        self._parameters, self._max_norm, self._device = dict(parameters), policy.max_grad_norm, mesh.device
        self._tensor_rank = mesh.tensor_rank
        self.local = {name: torch.nn.Parameter(local_part(p)) for name, p in parameters.items()}
        held = {name: p for name, p in self.local.items() if p.numel()}
        self._decayed = [p for name, p in held.items() if parameters[name].ndim > 1]
        plain = [p for name, p in held.items() if parameters[name].ndim <= 1]
        self.adam = torch.optim.Adam(
            [group for group in ({"params": self._decayed}, {"params": plain}) if group["params"]],
            betas=(given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)),
            eps=given.get("adam_eps", 1e-8),
            decoupled_weight_decay=given.get("decoupled_weight_decay", True),
            fused=True if mesh.device.type == "cuda" else None,
        )

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.schedule.learning_rate(self.steps)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Collective. L2 norm of the whole gradient: each element counts once."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        gradients = [g for parameter in self._parameters.values() if (g := self._counted(parameter)) is not None]
        if gradients:
            norms = torch._foreach_norm(gradients, dtype=torch.float32)
            squares += torch.stack(norms).double().square().sum().to(self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return float(squares.sqrt())

    def _counted(self, parameter: Tensor) -> Tensor | None:
        """The local gradient, on the one of the ranks that hold the same elements."""
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        mesh = gradient.device_mesh
        whole = mesh.ndim == 1 or isinstance(gradient.placements[-1], Replicate)
        local = gradient.to_local()
        return None if (whole and self._tensor_rank > 0) or not local.numel() else local

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """Clip, and go one step. grad_norm: what `grad_norm` says."""
        for name, parameter in self._parameters.items():
            if self.local[name].numel():
                assert parameter.grad is not None
                self.local[name].grad = parameter.grad.to_local()
        gradients = [p.grad for p in self.local.values() if p.grad is not None]
        share = self._max_norm / (grad_norm + 1e-6)
        if share < 1 and gradients:
            torch._foreach_mul_(gradients, share)
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate
            decayed = bool(self._decayed) and group["params"][0] is self._decayed[0]
            group["weight_decay"] = self.schedule.weight_decay(self.steps) if decayed else 0.0
        self.adam.step()
        self.steps += 1
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter in (*self._parameters.values(), *self.local.values()):
            parameter.grad = None

    # -- state ---------------------------------------------------------------------------------------------------
    def moments(self) -> dict[str, dict[str, Tensor]]:
        """{parameter: {moment: this rank's part}}, float32; zeros before the first step, as Adam begins."""
        return {name: {key: self._state(p)[key] for key in MOMENTS} for name, p in self.local.items()}

    def tensors(self) -> Iterator[Tensor]:
        """What the optimizer keeps, without making it."""
        for state in self.adam.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def restore(self, steps: int) -> None:
        """After the moments have been written into what `moments` gave."""
        self.steps = steps
        if steps == 0:
            self.adam.state.clear()
        for state in self.adam.state.values():
            state["step"].fill_(steps)

    def _state(self, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
        state = self.adam.state[parameter] if parameter.numel() else {}
        if not state:
            # As Adam makes them; a tensor of its own for each count.
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=parameter.device if parameter.is_cuda else "cpu"
            )
            for key in MOMENTS:
                state[key] = torch.zeros_like(parameter, requires_grad=False)
        return state
