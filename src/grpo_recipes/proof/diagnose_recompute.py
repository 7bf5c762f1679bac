"""Logprobs of stored rollouts anew: by the trainer in one process, and by transformers as the outside reference."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from grpo_recipes.engine.setup import make_strategies, trainer_class
from grpo_recipes.policy.contract import Batch
from grpo_recipes.proof.diagnose_causes import Logprobs
from grpo_recipes.recipe.schema import PolicyConfig
from grpo_recipes.runs.rollout_store import StoredRollouts

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
Precision = Literal["float64", "float32", "bfloat16"]


@dataclass(frozen=True)
class Sequences:
    """Prompts with what was drawn after them; R drawn tokens in all."""

    token_ids: tuple[torch.Tensor, ...]  # int64 [prompt + response] each
    prompt_lengths: tuple[int, ...]
    logprobs: Logprobs  # [R], the sampler's
    weight_versions: NDArray[np.int32]  # [R]

    @property
    def batch(self) -> Batch:
        lengths = torch.tensor([len(ids) for ids in self.token_ids])
        masks = []
        for prompt, ids in zip(self.prompt_lengths, self.token_ids, strict=True):
            masks.append(torch.arange(len(ids)) >= prompt)
        mask = torch.cat(masks)
        zeros = torch.zeros(len(mask))
        return Batch(torch.cat(self.token_ids), lengths, mask, zeros, zeros, zeros)


def sequences_of(stored: StoredRollouts, chosen: Sequence[int]) -> Sequences:
    prompts = np.split(stored.prompt_ids, np.cumsum(stored.prompt_lengths)[:-1])
    ends = np.cumsum(stored.response_lengths)[:-1]
    responses, logprobs, versions = (
        np.split(values, ends) for values in (stored.response_ids, stored.logprobs, stored.weight_versions)
    )
    return Sequences(
        tuple(torch.from_numpy(np.concatenate((prompts[n], responses[n])).astype(np.int64)) for n in chosen),
        tuple(len(prompts[n]) for n in chosen),
        np.concatenate([logprobs[n] for n in chosen]).astype(np.float64),
        np.concatenate([versions[n] for n in chosen]),
    )


class Trainer:
    """The trainer as the recipe builds it, but whole on one device, whatever the run's layout."""

    def __init__(self, policy: PolicyConfig, folder: Path, **megatron: Any) -> None:
        """folder: Hugging Face model. megatron: further fields of policy.megatron_cfg."""
        from grpo_recipes.policy.megatron.whole_model import OF_A_SPLIT_MODEL

        given = policy.megatron_cfg.model_dump(exclude_unset=True, exclude=set(OF_A_SPLIT_MODEL))
        whole = {"tensor_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel": False}
        self.policy = policy.model_copy(
            update={
                "megatron_cfg": type(policy.megatron_cfg).model_validate(given | megatron),
                "dtensor_cfg": policy.dtensor_cfg.model_copy(update=whole),
            }
        )
        self.folder = folder
        self.temperature = policy.generation.temperature
        self._trainer = trainer_class(policy)(self.policy, self.temperature, 1, folder)
        self._trainer.offload("optimizer")

    @property
    def config(self) -> Any:
        """Megatron-Core's TransformerConfig; None with the DTensor trainer."""
        built = getattr(self._trainer, "built", None)
        return built and built.config

    def logprobs(self, sequences: Sequences, *, temperature: float | None = None, alone: bool = False) -> Logprobs:
        """alone: each sequence in a pass of its own, instead of packed as in the run."""
        batch = sequences.batch
        lengths = batch.lengths.tolist()
        cuts = (
            [[n] for n in range(len(lengths))] if alone else make_strategies(self.policy, self.folder)[1].alone(lengths)
        )
        self._trainer.temperature = self.temperature if temperature is None else temperature
        found = self._trainer.logprobs([batch.select(members) for members in cuts])
        pieces: dict[int, torch.Tensor] = {}
        for members, logprobs in zip(cuts, found, strict=True):
            pieces.update(zip(members, logprobs.split([lengths[n] for n in members]), strict=True))
        joined = torch.cat([pieces[n] for n in range(len(lengths))])
        return joined[batch.mask].double().numpy()

    def take(self, folder: Path) -> None:
        """Other weights of the same model."""
        from grpo_recipes.policy.hf.folder import SafetensorsFolder

        self._trainer.weights.load(SafetensorsFolder(folder))

    def export(self, folder: Path) -> None:
        folder.mkdir()
        self._trainer.export(folder)

    def close(self) -> None:
        self._trainer.close()
        _free()


@contextmanager
def trainer_of(policy: PolicyConfig, folder: Path, **megatron: Any) -> Iterator[Trainer]:
    trainer = Trainer(policy, folder, **megatron)
    try:
        yield trainer
    finally:
        trainer.close()


@dataclass(frozen=True)
class Recomputed:
    logprobs: Logprobs
    experts: NDArray[np.int64] | None  # [R, layers, choices], sorted, at the position each token was drawn at


@torch.no_grad()
def by_transformers(
    folder: Path, sequences: Sequences, temperature: float, precision: Precision, attention: str = "eager"
) -> Recomputed:
    """Each sequence in a pass of its own. attention: "eager" or "sdpa"."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    has_experts = any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts"))
    # The only implementation of experts in float64.
    options = {"experts_implementation": "eager"} if has_experts else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[precision], attn_implementation=attention, local_files_only=True, **options
    )
    model = model.to(device).eval()
    chosen: list[torch.Tensor] = []
    hooks = [module.register_forward_hook(_keep(chosen)) for module in _routers(model)]
    logprobs, experts = [], []
    for ids, prompt in zip(sequences.token_ids, sequences.prompt_lengths, strict=True):
        chosen.clear()
        ids = ids.to(device)
        logits = model(ids[None], use_cache=False).logits[0, prompt - 1 : -1]
        logits = logits if precision == "float64" else logits.float()
        drawn = (logits / temperature).log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]
        logprobs.append(drawn.double().cpu().numpy())
        if chosen:
            experts.append(torch.stack(chosen, 1)[prompt - 1 : -1].sort(-1).values.cpu().numpy())
    for hook in hooks:
        hook.remove()
    del model
    _free()
    return Recomputed(np.concatenate(logprobs), np.concatenate(experts) if experts else None)


def _routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Of transformers' models with experts, in the order of the layers; their third output are the chosen experts."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def _keep(chosen: list[torch.Tensor]) -> Callable[..., None]:
    return lambda module, inputs, output: chosen.append(output[2])


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
