"""policy.generation.vllm_cfg against the snapshot of vLLM's own engine arguments (vllm_fields.json, written by
generation/vllm/field_snapshot.py). Every key is one of them, and is handed to vLLM as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from grpo_recipes.recipe.field_types import type_problems
from grpo_recipes.recipe.problems import Problem, nearest
from grpo_recipes.recipe.schema import GenerationConfig, PolicyConfig

FIELDS_FILE = Path(__file__).with_name("vllm_fields.json")
WHERE = "policy.generation.vllm_cfg"
LEAST_TEMPERATURE = 0.01  # vLLM raises what is lower to this, and the trainer would not know

# What the rest of the recipe says, or what correct training needs: engine argument -> why it cannot be set.
DERIVED = {
    "model": "it is policy.model_name",
    "model_weights": "the trainer hands its weights over",
    "served_model_name": "nothing is served",
    "tokenizer": "token ids go in and come out",
    "skip_tokenizer_init": "token ids go in and come out",
    "dtype": "it is policy.precision",
    "seed": "every sample has its own",
    "trust_remote_code": "it is policy.trust_remote_code",
    "max_logprobs": "the drawn token's is asked for",
    "logprobs_mode": "the trainer compares with the distribution that tokens were drawn from",
    "generation_config": "a model's own sampling settings would change the distribution",
    "override_generation_config": "sampling settings would change the distribution",
    "logits_processors": "the trainer could not mirror them",
    "load_format": "the trainer hands its weights over",
    "use_fp64_gumbel": "a batch of greedy and drawn samples would lose its seeds on a CPU",
    "enable_sleep_mode": "it follows from the device",
    "worker_extension_cls": "the trainer's weights arrive through it",
    "runner": "the model generates",
    "convert": "the model generates",
}


@cache
def fields() -> dict[str, dict[str, Any]]:
    """{argument: {type, default, accepts, choices}} of the pinned vLLM."""
    snapshot = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = snapshot["AsyncEngineArgs"]
    return found


def vllm_version() -> str:
    """The one that vllm_fields.json is of."""
    version: str = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))["vllm"]
    return version


def vllm_problems(policy: PolicyConfig) -> list[Problem]:
    """Every key of vllm_cfg that is no engine argument, cannot be set, or has a value of the wrong type; and what
    vLLM would do otherwise than the trainer."""
    return [*_keys(policy.generation), *(_combinations(policy) if policy.generation.backend == "vllm" else ())]


def _keys(generation: GenerationConfig) -> Iterator[Problem]:
    known = fields()
    for key, value in generation.vllm_cfg.items():
        path = f"{WHERE}.{key}"
        if key in DERIVED:
            yield Problem(path, f"cannot be set: {DERIVED[key]}", "remove it")
        elif key not in known:
            close = nearest(key, [name for name in known if name not in DERIVED])
            mend = f"did you mean {' or '.join(f'{WHERE}.{name}' for name in close)}?" if close else "remove it"
            yield Problem(path, "is not an engine argument of vLLM", mend)
        elif not known[key]["accepts"]:
            yield Problem(path, f"is a {known[key]['type']}, which a recipe cannot express", "remove it")
        else:
            yield from type_problems(path, value, known[key]["accepts"], known[key]["choices"])


def _combinations(policy: PolicyConfig) -> Iterator[Problem]:
    generation = policy.generation
    if generation.temperature < LEAST_TEMPERATURE:
        yield Problem(
            "policy.generation.temperature",
            f"{generation.temperature}: vLLM draws at {LEAST_TEMPERATURE} whatever is lower",
            f"set it to {LEAST_TEMPERATURE} or more",
        )
    length = generation.vllm_cfg.get("max_model_len")
    if isinstance(length, int) and length < policy.max_total_sequence_length:
        yield Problem(
            f"{WHERE}.max_model_len",
            f"{length} tokens cannot hold a sequence of max_total_sequence_length {policy.max_total_sequence_length}",
            "remove it (that length is its default), or raise it",
        )
