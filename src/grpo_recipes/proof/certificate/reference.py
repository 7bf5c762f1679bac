"""The reference of a layout certificate: Hugging Face transformers in float64 on a random checkpoint.

Each sequence runs alone, so nothing is packed, padded or cut. The denominator of the loss, gradient clipping and AdamW
are written out here once more instead of being taken from the engine; only the formula of the loss is the engine's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_recipes.engine.batch import Sample, make_batch
from grpo_recipes.engine.importance import Correction, importance_weights
from grpo_recipes.engine.losses import policy_loss
from grpo_recipes.policy.contract import Batch, LossInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEPS = 3
TEMPERATURE = 0.7  # other than 1, so that a logprob without it shows
LENGTHS = (5, 17, 2, 9, 30, 12)  # tokens of the sequences of a step, rotated by one from step to step
# Old minus current logprob, in turn. The ratios e^-x, 3.3, 1.6, 1.1, 1, 0.9 and 0.6, lie on all sides of the clips and
# at least 0.1 from each, so that rounding cannot switch one on or off.
OLD_NOISE = (-1.2, -0.5, -0.1, 0.0, 0.1, 0.5)
# Every term of the loss is on.
LOSS = partial(
    policy_loss,
    clip_min=0.2,
    clip_max=0.28,
    dual_clip=3.0,
    kl_penalty=0.05,
    kl_type="k3",
)


@dataclass(frozen=True)
class Optimizer:
    """AdamW as Megatron runs it: decoupled weight decay, none on tensors of one dimension; clipped by the global norm.

    eps is far above the usual 1e-8: there, an element whose gradient is rounding alone moves as far as any other, which
    would compare noise. At 0.01, the size of the larger elements of a clipped gradient, a step is nearly linear in the
    gradient.
    """

    lr: float = 2e-2
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-2
    weight_decay: float = 0.1
    max_grad_norm: float = 0.5


OPTIMIZER = Optimizer()


@dataclass(frozen=True)
class Step:
    """What the reference found in one optimizer step."""

    loss: float
    grad_norm: float  # before clipping
    tokens: float
    clipped: float  # tokens
    entropy: float  # nats, sum over tokens


@dataclass(frozen=True)
class Reference:
    """What candidates are compared with. `tensors` names a safetensors file with, in float64 by Hugging Face name,
    "gradient/NAME" of the first step and "weight/NAME" after the last; `changes` holds each weight's largest change."""

    batches: tuple[Batch, ...]  # one a step, all of its sequences
    steps: tuple[Step, ...]
    logprobs: Tensor  # float64 [T] of the first batch, by the weights of the checkpoint
    tensors: Path
    changes: dict[str, float]


def write_checkpoint(config: Mapping[str, Any], folder: Path, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A random model of this config.json, saved as transformers saves it; its weights are representable in `dtype`.

    Norms and biases are random too, so that a mistake in them shows. Matrices keep activations at about 1.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    hf._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager").to(dtype)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=draw))
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / math.sqrt(parameter.shape[-1]))
    model.save_pretrained(folder)
    return model.eval()


def run_reference(model: PreTrainedModel, file: Path, seed: int = 0) -> Reference:
    """Three optimizer steps, each on a batch whose old, sampler and reference logprobs lie around the current ones."""
    from safetensors.torch import save_file

    model = model.double()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = _adamw(model)
    draw = torch.Generator().manual_seed(seed)
    batches, steps = [], []
    for number in range(STEPS):
        batch = _random_batch(number, model.config.vocab_size, draw)
        logprobs, entropy = logprobs_of(model, batch)
        batch = _with_logprobs(batch, logprobs.detach(), draw)
        optimizer.zero_grad()
        mask = batch.mask
        exact = replace(batch, weights=mask.double() / mask.sum())  # the global denominator of the step
        found = LOSS(LossInputs(logprobs, entropy, exact))
        found.loss.backward()
        gradients = {name: _gradient(p).clone() for name, p in model.named_parameters()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        for parameter in model.parameters():
            parameter.grad = _gradient(parameter) * min(1.0, OPTIMIZER.max_grad_norm / (norm + 1e-6))
        optimizer.step()
        batches.append(batch)
        steps.append(
            Step(
                float(found.loss.detach()),
                norm,
                *(float(found.sums[name]) for name in ("tokens", "clipped", "entropy")),
            )
        )
        if number == 0:
            first_logprobs, first_gradients = logprobs.detach(), gradients
    end = {name: p.detach() for name, p in model.named_parameters()}
    changed = as_saved(model, {name: (end[name] - start[name]).abs() for name in end})
    tensors = {f"gradient/{name}": tensor for name, tensor in as_saved(model, first_gradients).items()}
    tensors |= {f"weight/{name}": tensor for name, tensor in as_saved(model, end).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    changes = {name: float(tensor.max()) for name, tensor in changed.items()}
    return Reference(tuple(batches), tuple(steps), first_logprobs, file, changes)


def logprobs_of(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy, float64 [T], aligned with the token they speak of; 0 at the first of a sequence."""
    logprobs, entropies = [], []
    for ids in batch.token_ids.split(batch.lengths.tolist()):
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        none = log_p.new_zeros(1)
        logprobs.append(torch.cat((none, log_p.gather(1, ids[1:, None])[:, 0])))
        entropies.append(torch.cat((none, -(log_p.exp() * log_p).sum(-1))))
    return torch.cat(logprobs), torch.cat(entropies)


def as_saved(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names and in the shapes of a saved model: transformers holds the experts of a layer in one tensor."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.clone() for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Zeros where the loss does not depend on it: experts that no token was routed to."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _adamw(model: PreTrainedModel) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)


def _random_batch(number: int, vocab_size: int, draw: torch.Generator) -> Batch:
    lengths = LENGTHS[number:] + LENGTHS[:number]
    samples = []
    for length in lengths:
        ids = torch.randint(0, vocab_size, (length,), generator=draw)
        prompt = max(1, length // 3)
        samples.append(Sample(tuple(ids[:prompt].tolist()), ids[prompt:], torch.zeros(length - prompt), 0.0))
    batch = make_batch(samples, [range(len(samples))], token_level=True)
    # One a token: an advantage that reaches the wrong token shows.
    return replace(batch, advantages=torch.randn(len(batch.mask), generator=draw) * batch.mask)


def _with_logprobs(batch: Batch, current: Tensor, draw: torch.Generator) -> Batch:
    noise = torch.tensor(OLD_NOISE, dtype=torch.float64)
    old = current + noise[torch.arange(len(current)) % len(OLD_NOISE)]

    def around(logprobs: Tensor) -> Tensor:
        return (logprobs + 0.2 * torch.randn(len(current), generator=draw, dtype=torch.float64)) * batch.mask

    old, sampler = (old * batch.mask).float(), around(old).float()
    return replace(
        batch,
        sampler_logprobs=sampler,
        old_logprobs=old,
        reference_logprobs=around(current).float(),
        importance_weights=importance_weights(old, sampler, batch.mask, batch.lengths, Correction()),
    )
