"""The Megatron-Core trainer: one rank of policy.contract.Policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_recipes.policy.alignment import alignment_of
from grpo_recipes.policy.contract import Batch, Loss, LossInputs, Part, TrainStats, WeightSpec
from grpo_recipes.policy.megatron import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from grpo_recipes.policy.hf.families import family_of  # noqa: E402
from grpo_recipes.policy.hf.folder import (  # noqa: E402
    RandomTensors,
    SafetensorsFolder,
    export_model,
    read_config,
)
from grpo_recipes.policy.logprobs import logprobs_and_entropy  # noqa: E402
from grpo_recipes.policy.megatron import checkpoint, parallel  # noqa: E402
from grpo_recipes.policy.megatron.core_attention import packed_inputs  # noqa: E402
from grpo_recipes.policy.megatron.decode import Decoder  # noqa: E402
from grpo_recipes.policy.megatron.expert_load import ExpertLoad  # noqa: E402
from grpo_recipes.policy.megatron.model import build_model  # noqa: E402
from grpo_recipes.policy.megatron.moe import set_aux_loss_scale  # noqa: E402
from grpo_recipes.policy.megatron.offload import memory_of  # noqa: E402
from grpo_recipes.policy.megatron.optimizer import build_optimizer, build_scheduler, wrap_model  # noqa: E402
from grpo_recipes.policy.megatron.weights import WeightMap  # noqa: E402
from grpo_recipes.policy.padding import pad  # noqa: E402
from grpo_recipes.policy.passes import combine, on_device, per_real_token  # noqa: E402

if TYPE_CHECKING:
    from grpo_recipes.recipe.schema import PolicyConfig


class MegatronPolicy:
    """Implements policy.contract.Policy.

    Args:
        policy: the recipe's section.
        temperature: divides the logits before every log-softmax.
        total_optimizer_steps: of the whole run; the default length of the learning-rate decay.
        model_folder: Hugging Face model, already on this machine.
        needs_reference: keep a copy of the initial weights in CPU memory for `reference_logprobs`.
        seed: of the trainer's own random streams (dropout, if a recipe turns it on).

    Raises UserError for a folder or setting that cannot work.
    """

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
        self.temperature, self.model_folder = temperature, model_folder
        hf = read_config(model_folder, trust_remote_code=policy.trust_remote_code)
        family = family_of(hf)
        if not torch.cuda.is_available():
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # Megatron reads none of it, and it takes time
        parallel.initialize(policy.megatron_cfg, seed)
        self.built = build_model(hf, family, policy)
        self.replica, self._replica_group = parallel.replica(self.built.config)
        self._context = parallel.context_shard()
        self._alignment = alignment_of(policy.megatron_cfg)
        self.weights = WeightMap(self.built, hf, family)
        random = policy.initial_weights == "random"
        self._trained_from_source = not random
        self.weights.load(
            RandomTensors(hf.initializer_range, policy.init_seed) if random else SafetensorsFolder(model_folder)
        )
        self.weights.gather_plan()
        self.model = wrap_model(self.built, policy)
        self.built.config.finalize_model_grads_func = _sum_gradients
        no_sync = [chunk.no_sync for chunk in self.model]
        self.built.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.optimizer = build_optimizer(self.model, policy)
        self.scheduler = build_scheduler(self.optimizer, policy, total_optimizer_steps)
        self.built.config.grad_scale_func = self.optimizer.scale_loss
        self._checkpoints = checkpoint.CheckpointWriter(
            checkpoint.Trained(self.weights, self.built.chunks, self.model, self.optimizer, self.scheduler)
        )
        self._memory = memory_of(self.model, self.optimizer)
        self._reference = self._host_copy() if needs_reference else None
        config = self.built.config
        experts = config.num_moe_experts
        self._expert_load = ExpertLoad(self.built.chunks, config.num_layers, experts) if experts else None
        self._empty_unused = policy.megatron_cfg.empty_unused_memory_level if torch.cuda.is_available() else 0

    # -- the contract -------------------------------------------------------------------------------------------
    def share(self, batch: Batch | None) -> Batch:
        box = [batch]
        if self._replica_group is not None:
            dist.broadcast_object_list(box, self.replica.ranks[0], group=self._replica_group)
        assert box[0] is not None, "the first rank of the replica has a batch"
        return box[0]

    def train(self, microbatches: Sequence[Batch], loss: Loss) -> TrainStats:
        total, sums, maxima = self.accumulate(microbatches, loss)
        if self._empty_unused >= 1:
            torch.cuda.empty_cache()
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        learning_rate = self.learning_rate
        skipped = not (math.isfinite(total) and math.isfinite(grad_norm))
        if not skipped:
            self.optimizer.step()
            self.scheduler.step(1)
        if self._empty_unused >= 2:
            torch.cuda.empty_cache()
        load = self._expert_load.shares() if self._expert_load is not None else ()
        return TrainStats(total, grad_norm, learning_rate, skipped, sums, maxima, load)

    def logprobs(self, microbatches: Sequence[Batch], *, temperature: float | None = None) -> list[Tensor]:
        self._memory.onload("weights")
        for chunk in self.model:
            chunk.eval()
        sampling, self.temperature = self.temperature, temperature or self.temperature
        try:
            with torch.no_grad():
                found = self._run(microbatches, None)
        finally:
            self.temperature = sampling
        return _from_last_stage(found)

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
        checkpoint.load(folder, self._checkpoints.trained)

    def export(self, folder: Path) -> None:
        self._memory.onload("weights")
        tensors = self.weights.gather()
        if dist.get_rank() == 0:
            dtype = self.built.config.params_dtype
            export_model(folder, self.model_folder, tensors, dtype, trained_from_source=self._trained_from_source)
        else:
            for _ in tensors:  # every rank takes part in gathering
                pass
        dist.barrier()

    # -- for certificates ---------------------------------------------------------------------------------------
    def accumulate(self, microbatches: Sequence[Batch], loss: Loss) -> tuple[float, dict[str, float], dict[str, float]]:
        """Forward and backward: loss, sums and maxima of the step, equal on every rank. Gradients stay in the buffers."""
        self._memory.onload("weights", "optimizer")
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self._expert_load is not None:
            self._expert_load.reset()
            set_aux_loss_scale(self.built.config, self._tokens_of_all_ranks(microbatches))
        return _combine(self._run(microbatches, loss))

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Collective. Whole float32 gradients by Hugging Face name, after `accumulate`."""
        for chunk in self.model:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                peers = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets if peers.size() > 1 else ():
                    mine = bucket.grad_data.chunk(peers.size())[peers.rank()].clone()  # the rest was not reduced here
                    dist.all_gather_into_tensor(bucket.grad_data, mine, group=peers)
        found = self.weights.gather(of=lambda parameter: parameter.main_grad.float(), dtype=torch.float32)
        return {name: gradient.clone() for name, gradient in found}

    def close(self) -> None:
        """Let go of model and groups. Megatron's gradient hooks hold them in a cycle that Python cannot collect: through
        the wrapper, and through the last graph, which token dispatchers of experts keep. An empty wrapper holds nothing."""
        for chunk in self.model:
            chunk.__dict__.clear()
        self.built.config.no_sync_func = self.built.config.grad_scale_func = None
        self.__dict__.clear()

    # -- for the embedded sampler and the manifest --------------------------------------------------------------
    def decoder(self, *, max_batch_size: int, max_sequence_length: int) -> Decoder:
        """A KV-cache decoder on this policy's own weights."""
        return Decoder(self.built, max_batch_size=max_batch_size, max_sequence_length=max_sequence_length)

    def describe(self) -> dict[str, str]:
        layer = self.built.chunks[0].decoder.layers[0]
        return {
            "backend": "megatron-core",
            "layer_spec": self.built.spec,
            "attention": layer.self_attention.core_attention.kernel_name(),
            "dtype": str(self.built.config.params_dtype).removeprefix("torch."),
            "device": self.device.type,
        }

    @property
    def device(self) -> torch.device:
        return self.built.rotary.inverse_frequencies.device

    @property
    def optimizer_steps(self) -> int:
        return int(self.scheduler.num_steps)

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    # -- one pass over microbatches -----------------------------------------------------------------------------
    def _run(self, microbatches: Sequence[Batch], loss: Loss | None) -> list[Any]:
        """What the last pipeline stage makes of each microbatch (nothing on other stages)."""
        longest = max(int(m.lengths.sum()) for m in microbatches)
        return get_forward_backward_func()(
            forward_step_func=lambda batches, model: self._forward(next(batches), model, loss),
            data_iterator=[iter(microbatches) for _ in self.model],
            model=self.model,
            num_microbatches=len(microbatches),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
        )

    def _tokens_of_all_ranks(self, microbatches: Sequence[Batch]) -> int:
        """What routers will see of the step, padding included (see moe.set_aux_loss_scale)."""
        mine = sum(self._alignment.computed(m.lengths.tolist()) for m in microbatches)
        tokens = torch.tensor(mine, device=self.device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        return int(tokens)

    def _forward(self, batch: Batch, model: torch.nn.Module, loss: Loss | None) -> tuple[Tensor, Any]:
        padded = pad(batch.token_ids, batch.lengths, self._alignment)
        token_ids = padded.token_ids.to(self.device, non_blocking=True)
        inputs = packed_inputs(padded.lengths, self.built.rotary, self.built.config.params_dtype, context=self._context)
        packing = inputs.packing
        next_ids = token_ids.roll(-1)
        if packing.context is not None:
            token_ids, next_ids = token_ids[packing.held], next_ids[packing.held]
        output = model(
            token_ids[None],
            None,
            None,
            packed_seq_params=inputs,
            output_processor=self._per_token,
            output_processor_context=next_ids,
        )

        def finish(output: Tensor, non_loss_data: bool = False) -> Any:
            aligned = per_real_token(output, padded, packing)
            if non_loss_data:
                return aligned[0].detach()
            found = loss(LossInputs(aligned[0], aligned[1], on_device(batch, self.device)))
            none = torch.zeros((), dtype=torch.int, device=self.device)  # nothing is divided by a count of tokens
            return found.loss, none, found

        return output, finish

    def _per_token(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Any, context: Tensor, **_: Any
    ) -> Tensor:
        """float32 [2, N]: logprob of the token after each, int64 [N], and entropy, in place of the logits. What the last
        token of a sequence says of the next sequence is masked later."""
        logits, _ = output_layer(hidden_states, weight=output_weight)
        group = parallel_state.get_tensor_model_parallel_group()
        start = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        real = max(0, min(logits.shape[-1], self.built.vocab_size - start))
        # Views, so that the gradient that takes the place of the logits is not copied on its way back.
        rows = logits.flatten(0, 1)
        return logprobs_and_entropy(
            rows if real == rows.shape[1] else rows[:, :real],
            context,
            self.temperature,
            vocab_start=start,
            group=group if group.size() > 1 else None,
        )

    # -- weights ------------------------------------------------------------------------------------------------
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.built.chunks for parameter in chunk.parameters()]

    @torch.no_grad()
    def _host_copy(self) -> list[Tensor]:
        return [torch.empty_like(p, device="cpu", pin_memory=p.is_cuda).copy_(p) for p in self._parameters()]

    @torch.no_grad()
    def _swap(self, weights: Sequence[Tensor]) -> None:
        """Exchange the model's weights with others, which costs the device no more than the largest tensor."""
        for parameter, weight in zip(self._parameters(), weights, strict=True):
            held = parameter.detach().clone()
            parameter.copy_(weight)
            weight.copy_(held)


def _sum_gradients(model: list[torch.nn.Module], _num_tokens: Any, **kwargs: Any) -> None:
    """Megatron's finalisation without its division by a number of tokens: losses arrive as shares of the whole."""
    finalize_model_grads(model, None, **kwargs)


def _combine(outputs: Sequence[Any]) -> tuple[float, dict[str, float], dict[str, float]]:
    """Loss, sums and maxima over microbatches, data-parallel ranks and pipeline stages; float64."""
    alone = dist.get_world_size() == 1
    total = combine(outputs, None if alone else parallel_state.get_data_parallel_group())
    return total if alone else _from_last_stage(total)


def _from_last_stage(value: Any) -> Any:
    """Tensors come out on the CPU."""
    if isinstance(value, list):
        value = [tensor.cpu() for tensor in value]
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(box, last, group=parallel_state.get_pipeline_model_parallel_group())
    return box[0]
