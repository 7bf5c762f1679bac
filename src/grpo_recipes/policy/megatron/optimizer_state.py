"""Adam's state of one parameter, whichever optimizer holds it: torch's, TransformerEngine's (also where it holds the
float32 weights itself), or Megatron's, which keeps a share of them in host memory.

Upstream's own access (DistributedOptimizer._set_main_param_and_optimizer_states) leaves out torch's `step`, fails before
the first step, and does not reach what lies in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class Slot(NamedTuple):
    """Where the state of a parameter's shard is.

    Attributes:
        adam: the optimizer that steps it.
        main: the tensor that `adam` steps; float32, or the model's own if `adam` holds the float32 weights.
        shown: the tensor that Megatron knows for it; another one than `main` where that lies in host memory.
    """

    adam: torch.optim.Optimizer
    main: Tensor
    shown: Tensor


class OptimizerState:
    """All states of one DistributedOptimizer. Tensors are float32 and flat, as long as this rank's shard."""

    def __init__(self, part: DistributedOptimizer) -> None:
        self.part, self.outer = part, part.optimizer
        self.adams = self.outer.sub_optimizers if isinstance(self.outer, HybridDeviceOptimizer) else [self.outer]
        self._adam_of = {id(p): adam for adam in self.adams for group in adam.param_groups for p in group["params"]}

    def _slot(self, parameter: torch.nn.Parameter) -> Slot:
        group, order = self.part.model_param_group_index_map[parameter]
        shown = self.outer.param_groups[group]["params"][order]
        main = self.outer.param_to_inner_param[shown] if isinstance(self.outer, HybridDeviceOptimizer) else shown
        return Slot(self._adam_of[id(main)], main, shown)

    def steps(self) -> int:
        """Adam's count: torch keeps it per parameter, TransformerEngine per group."""
        counts = [0]
        for adam in self.adams:
            counts += [int(group["step"]) for group in adam.param_groups if "step" in group]
            counts += [int(state["step"]) for state in adam.state.values() if "step" in state]
        return max(counts)

    def read(self, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
        """The float32 weights ("param") and, after the first step, both moments; live where they are float32."""
        adam, main, _ = self._slot(parameter)
        state = adam.state.get(main, {})
        weights = state["master_param"] if main.dtype != torch.float32 and "master_param" in state else main
        moments = {name: state[name].float() for name in MOMENTS if name in state}
        return {"param": weights.detach().float(), **moments}

    def prepare(self, steps: int) -> None:
        """Forget every state; count so many steps."""
        for adam in self.adams:
            adam.state.clear()
            if _is_torch(adam):
                continue
            for group in adam.param_groups:
                group.pop("step", None)
                if steps:
                    group["step"] = steps

    def write(self, parameter: torch.nn.Parameter, tensors: Mapping[str, Tensor], steps: int) -> None:
        """What `read` gave, on any device; after `prepare`."""
        adam, main, shown = self._slot(parameter)
        main.detach().copy_(tensors["param"])
        if shown is not main:
            shown.detach().copy_(tensors["param"])
        if not steps:
            return
        if _is_torch(adam):  # a step of its own for each: one tensor shared by all would advance once per parameter
            adam.state[main] = {"step": torch.tensor(float(steps))}
            for name in MOMENTS:
                adam.state[main][name] = torch.empty_like(main).copy_(tensors[name])
            return
        for name in MOMENTS:
            adam.set_scaled_state(main, name, tensors[name].to(main.device))
        if adam.master_weights and main.dtype != torch.float32:
            adam.set_scaled_state(main, "master_param", tensors["param"].to(main.device))

    def finish(self) -> None:
        """Bring what was written to the model's own weights on this rank."""
        if isinstance(self.outer, HybridDeviceOptimizer):
            self.outer._sync_sub_optimizers_state_to_hdo()
        self.part._copy_main_params_to_model_params()


def _is_torch(adam: Any) -> bool:
    return type(adam).__module__.startswith("torch.")
