"""The DTensor trainer: one rank of policy.contract.Policy on Hugging Face transformers, FSDP2 and DTensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_recipes.policy.alignment import alignment_of
from grpo_recipes.policy.attention import kernel_name, pack
from grpo_recipes.policy.contract import Batch, Loss, LossInputs, LossOutputs, Part, TrainStats, WeightSpec
from grpo_recipes.policy.dtensor.attention import AttentionInputs
from grpo_recipes.policy.dtensor.checkpoint import Checkpoints
from grpo_recipes.policy.dtensor.mesh import make_mesh
from grpo_recipes.policy.dtensor.model import build_model
from grpo_recipes.policy.dtensor.optimizer import Optimizer
from grpo_recipes.policy.dtensor.weights import Weights, local_part
from grpo_recipes.policy.hf.folder import RandomTensors, SafetensorsFolder, export_model, read_config
from grpo_recipes.policy.logprobs import logprobs_and_entropy
from grpo_recipes.policy.padding import pad
from grpo_recipes.policy.passes import combine, on_device, per_real_token
from grpo_recipes.policy.trainer_memory import TrainerMemory
from grpo_recipes.recipe.architecture import check_architecture

if TYPE_CHECKING:
    from grpo_recipes.recipe.schema import PolicyConfig


class DTensorPolicy:
    """Implements policy.contract.Policy. Arguments and errors as for policy.megatron.trainer.MegatronPolicy."""

    def __init__(
        self,
        policy: PolicyConfig,
        temperature: float,
        total_optimizer_steps: int,
        model_folder: Path,
        *,
        needs_reference: bool = False,
        seed: int = 0,
    ) -> None:
        self.temperature, self.model_folder, self._cfg = temperature, model_folder, policy.dtensor_cfg
        hf = read_config(model_folder, trust_remote_code=policy.trust_remote_code)
        check_architecture(hf.to_dict())
        if not torch.cuda.is_available():
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads it, and it takes time
        torch.manual_seed(seed)
        self._mesh = make_mesh(self._cfg)
        self.device, self.replica = self._mesh.device, self._mesh.replica
        self._alignment = alignment_of(self._cfg)
        self.model = build_model(hf, policy, self._mesh)
        self._dtype = getattr(torch, policy.precision)
        self.weights = Weights(self.model, self._dtype, self.device)
        random = policy.initial_weights == "random"
        self._trained_from_source = not random
        self.weights.load(
            RandomTensors(hf.initializer_range, policy.init_seed) if random else SafetensorsFolder(model_folder)
        )
        self.optimizer = Optimizer(self.weights.parameters, policy, total_optimizer_steps, self._mesh)
        self._checkpoints = Checkpoints(self.weights, self.optimizer, self._mesh)
        self._memory = TrainerMemory(
            self.device,
            weights=self._local_weights,
            optimizer=self.optimizer.tensors,
            gradients=list,
            drop_gradients=self.optimizer.drop_gradients,
        )
        self._reference = self._host_copy() if needs_reference else None

    # -- the contract -------------------------------------------------------------------------------------------
    def share(self, batch: Batch | None) -> Batch:
        box = [batch]
        if self._mesh.replica_group is not None:
            dist.broadcast_object_list(box, self.replica.ranks[0], group=self._mesh.replica_group)
        assert box[0] is not None, "the first rank of the replica has a batch"
        return box[0]

    def train(self, microbatches: Sequence[Batch], loss: Loss) -> TrainStats:
        total, sums, maxima = self.accumulate(microbatches, loss)
        grad_norm = self.optimizer.grad_norm()
        learning_rate = self.learning_rate
        skipped = not (math.isfinite(total) and math.isfinite(grad_norm))
        if not skipped:
            self.optimizer.step(grad_norm)
        return TrainStats(total, grad_norm, learning_rate, skipped, sums, maxima)

    @torch.no_grad()
    def logprobs(self, microbatches: Sequence[Batch], *, temperature: float | None = None) -> list[Tensor]:
        self._memory.onload("weights")
        sampling, self.temperature = self.temperature, temperature or self.temperature
        try:
            found = [self._forward(batch)[0].cpu() for batch in microbatches]
        finally:
            self.temperature = sampling
        # No backward pass frees what the last one gathered, and by the next one other weights may lie below it.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return found

    def reference_logprobs(self, microbatches: Sequence[Batch]) -> list[Tensor]:
        if self._reference is None:
            raise RuntimeError("this policy was built with needs_reference=False")
        self._memory.onload("weights")
        self._swap(self._reference)
        try:
            return self.logprobs(microbatches)
        finally:
            self._swap(self._reference)

    def weight_plan(self) -> Sequence[WeightSpec]:
        return self.weights.plan()

    def weight_buckets(self) -> Iterator[dict[str, Tensor]]:
        self._memory.onload("weights")
        return self.weights.buckets()

    def offload(self, part: Part) -> None:
        self._memory.offload(part)

    def save(self, folder: Path) -> dict[str, str]:
        self._memory.onload("weights", "optimizer")
        return self._checkpoints.save(folder)

    def start_save(self, folder: Path) -> None:
        self._memory.onload("weights", "optimizer")
        self._checkpoints.start(folder)

    def finish_save(self, *, wait: bool) -> dict[str, str] | None:
        return self._checkpoints.finish(wait=wait)

    def load(self, folder: Path) -> None:
        self._memory.onload("weights", "optimizer")
        self._checkpoints.load(folder)

    def export(self, folder: Path) -> None:
        self._memory.onload("weights")
        tensors = self.weights.gather()
        if dist.get_rank() == 0:
            export_model(folder, self.model_folder, tensors, self._dtype, trained_from_source=self._trained_from_source)
        else:
            for _ in tensors:  # every rank takes part in gathering
                pass
        dist.barrier()

    def describe(self) -> dict[str, str]:
        return {
            "backend": "dtensor",
            "attention": kernel_name(self._dtype),
            "compiled": str(self._cfg.torch_compile).lower(),
            "dtype": str(self._dtype).removeprefix("torch."),
            "device": self.device.type,
        }

    # -- for certificates ---------------------------------------------------------------------------------------
    def accumulate(self, microbatches: Sequence[Batch], loss: Loss) -> tuple[float, dict[str, float], dict[str, float]]:
        """Forward and backward: loss, sums and maxima of the step, equal on every rank. Gradients stay."""
        self._memory.onload("weights", "optimizer")
        self.optimizer.drop_gradients()
        outputs = []
        for batch in microbatches:
            found = loss(LossInputs(*self._forward(batch), on_device(batch, self.device)))
            found.loss.backward()
            outputs.append(LossOutputs(found.loss.detach(), found.sums, found.maxima))
        return combine(outputs, self._mesh.data_group)

    def gradients(self) -> dict[str, Tensor]:
        """Collective. Whole float32 gradients by Hugging Face name, after `accumulate`."""
        found = self.weights.gather(of=lambda parameter: parameter.grad, dtype=torch.float32)
        return {name: gradient.clone() for name, gradient in found}

    def close(self) -> None:
        """Let go of the model."""
        self.__dict__.clear()

    @property
    def optimizer_steps(self) -> int:
        return self.optimizer.steps

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return self.optimizer.learning_rate

    # -- one pass over a microbatch -----------------------------------------------------------------------------
    def _forward(self, batch: Batch) -> Tensor:
        """float32 [2, T]: logprob of each real token, and entropy of the distribution it was drawn from."""
        padded = pad(batch.token_ids, batch.lengths, self._alignment)
        packing = pack(padded.lengths, self.device, self._mesh.context)
        token_ids = padded.token_ids.to(self.device, non_blocking=True)
        next_ids = token_ids.roll(-1)
        if packing.context is not None:
            token_ids, next_ids = token_ids[packing.held], next_ids[packing.held]
        logits = self.model(
            input_ids=token_ids[None],
            position_ids=packing.positions[None],
            use_cache=False,
            attention_inputs=AttentionInputs(packing),
        ).logits[0]
        output = logprobs_and_entropy(
            logits,
            next_ids,
            self.temperature,
            vocab_start=self._mesh.tensor_rank * logits.shape[-1],  # the vocabulary is cut evenly
            group=self._mesh.tensor_group,
        )
        return per_real_token(output, padded, packing)

    # -- weights ------------------------------------------------------------------------------------------------
    def _local_weights(self) -> Iterator[Tensor]:
        return (local_part(parameter) for parameter in self.weights.parameters.values())

    @torch.no_grad()
    def _host_copy(self) -> list[Tensor]:
        return [torch.empty_like(w, device="cpu", pin_memory=w.is_cuda).copy_(w) for w in self._local_weights()]

    @torch.no_grad()
    def _swap(self, weights: Sequence[Tensor]) -> None:
        """Exchange the model's weights with others, which costs the device no more than the largest tensor."""
        for parameter, weight in zip(self._local_weights(), weights, strict=True):
            held = parameter.clone()
            parameter.copy_(weight)
            weight.copy_(held)
