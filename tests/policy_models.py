"""Tiny models and batches for the tests of the trainer, and their reference in Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_recipes.policy.contract import Batch, LossInputs, LossOutputs
from grpo_recipes.recipe.schema import PolicyConfig
from published_names import published

VOCAB = 17
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


# Beyond what every tiny model shares: grouped queries, and sizes that nothing divides by accident.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def write_model(
    family: str,
    folder: Path,
    *,
    seed: int = 1,
    max_shard_size: str = "50GB",
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Any:
    """A random model of 2 layers, grouped queries and head_dim != hidden / heads, saved as transformers saves it.

    `family` is a model_type; `config` overrides its tiny configuration. Returns the model of transformers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    values = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    hf = AutoConfig.for_model(family, **values | FAMILIES[family] | config)
    model = AutoModelForCausalLM.from_config(hf, experts_implementation="eager")  # the only one in float64
    with torch.no_grad():  # norms of one and biases of zero would hide a mistake in their order
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def write_llama(folder: Path, *, seed: int = 1, **config: Any) -> Any:
    """As write_model, with plain RoPE unless `config` says otherwise."""
    return write_model("llama", folder, seed=seed, **{"rope_parameters": None, **config})


def policy_config(folder: Path, **changes: Any) -> PolicyConfig:
    values = {
        "model_name": str(folder),
        "train_global_batch_size": 8,
        "max_total_sequence_length": 64,
        "precision": "float32",
        "generation": {"max_new_tokens": 8},
        "megatron_cfg": {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}},
    }
    return PolicyConfig(**values | changes)


def random_batch(sequences: int, *, seed: int = 0, shortest: int = 2, longest: int = 20) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (sequences,), generator=draw)
    tokens = int(lengths.sum())
    mask = torch.rand(tokens, generator=draw) < 0.6
    mask[lengths.cumsum(0) - lengths] = False
    return Batch(
        token_ids=torch.randint(0, VOCAB, (tokens,), generator=draw),
        lengths=lengths,
        mask=mask,
        weights=mask / mask.sum(),
        advantages=torch.randn(tokens, generator=draw),
        sampler_logprobs=torch.zeros(tokens),
    )


def policy_gradient_loss(inputs: LossInputs) -> LossOutputs:
    """Weighted log-likelihood times advantage, and some entropy, so that both outputs have a gradient."""
    batch = inputs.batch
    loss = -((inputs.logprobs * batch.advantages + 0.1 * inputs.entropy) * batch.weights).sum()
    return LossOutputs(
        loss,
        {"entropy": (inputs.entropy.detach() * batch.mask).sum(), "tokens": batch.mask.sum()},
        {"largest": inputs.logprobs.detach().abs().max()},
    )


def reference_outputs(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy [T] by transformers, each sequence alone, in the model's dtype (float64 for a reference)."""
    logprobs, entropies = [], []
    for ids in batch.token_ids.split(batch.lengths.tolist()):
        logp = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
        zero = logp.new_zeros(1)
        logprobs.append(torch.cat((zero, logp[:-1].gather(1, ids[1:, None])[:, 0])))
        entropies.append(torch.cat((zero, -(logp.exp() * logp).sum(-1)[:-1])))
    return torch.cat(logprobs), torch.cat(entropies)


def reference_gradients(model: Any, batch: Batch, temperature: float) -> dict[str, Tensor]:
    """Of policy_gradient_loss, by published Hugging Face name, float64."""
    model = model.double()
    model.zero_grad()
    logprobs, entropy = reference_outputs(model, batch, temperature)
    policy_gradient_loss(LossInputs(logprobs, entropy, batch)).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    return published(model.config.model_type, found)


def make_policy(
    backend: str,
    folder: Path,
    cfg: dict[str, Any] | None = None,
    *,
    optimizer: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    temperature: float = 1.0,
    steps: int = 20,
    needs_reference: bool = False,
    **changes: Any,
) -> Any:
    """The trainer of that name on a model's folder.

    Args:
        cfg: further keys of its own section of the recipe.
        changes: other keys of `policy`.
    """
    megatron = {"optimizer": optimizer or {"lr": 1e-2, "weight_decay": 0.1}, "scheduler": scheduler or {}}
    if backend == "megatron":
        from grpo_recipes.policy.megatron.trainer import MegatronPolicy as Trainer

        sections: dict[str, Any] = {"megatron_cfg": {**megatron, **(cfg or {})}}
    else:
        from grpo_recipes.policy.dtensor.trainer import DTensorPolicy as Trainer

        sections = {"megatron_cfg": {**megatron, "enabled": False}, "dtensor_cfg": {"enabled": True, **(cfg or {})}}
    config = policy_config(folder, **sections, **changes)
    return Trainer(config, temperature, steps, folder, needs_reference=needs_reference)


def gradients(policy: Any, microbatches: list[Batch]) -> dict[str, Tensor]:
    """Of policy_gradient_loss by the trainer, by Hugging Face name."""
    policy.accumulate(microbatches, policy_gradient_loss)
    found: dict[str, Tensor] = policy.gradients()
    return found


def weights_of(policy: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in policy.weight_buckets() for name, tensor in bucket.items()}
