"""Combinations of values that cannot work, each with its mend. Nothing here looks at a file or a device.

Those within policy.megatron_cfg are in layout.py and megatron_combinations.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from grpo_recipes.recipe.dtensor import trainer_problems
from grpo_recipes.recipe.problems import Problem
from grpo_recipes.recipe.schema import DataConfig, DatasetConfig, GRPOConfig, LossConfig, PolicyConfig, Recipe


def recipe_problems(recipe: Recipe) -> list[Problem]:
    """Every impossible combination in a recipe whose single values are valid."""
    return [
        *_algorithm(recipe),
        *_nodes(recipe),
        *(_grpo(recipe.grpo, recipe.policy) if recipe.grpo else ()),
        *_loss(recipe),
        *_lengths(recipe),
        *_data(recipe),
        *_asynchrony(recipe),
        *_engines(recipe),
        *_refit(recipe),
        *_sizes(recipe),
        *_patterns(recipe),
    ]


def _engines(recipe: Recipe) -> Iterator[Problem]:
    generation, where = recipe.policy.generation, "policy.generation.num_engines"
    if generation.num_engines == 1:
        return
    if generation.backend == "megatron":
        yield Problem(
            where,
            f"is {generation.num_engines}, and the embedded sampler has no engines: each trainer process samples",
            "set it to 1, or policy.generation.backend to vllm",
        )
    elif recipe.cluster.gpus_per_node:
        yield Problem(
            where,
            f"is {generation.num_engines}, and on GPUs an engine shares the trainer's: there is one",
            "set it to 1, and the engine's own parallel sizes in policy.generation.vllm_cfg",
        )


def _refit(recipe: Recipe) -> Iterator[Problem]:
    generation = recipe.policy.generation
    where, transport = "policy.generation.refit.transport", generation.refit.transport
    if transport == "auto":
        return
    if generation.backend == "megatron":
        yield Problem(
            where,
            f"is {transport}, and the embedded sampler lives in the trainer's processes: nothing is transported",
            "set it to auto, or policy.generation.backend to vllm",
        )
    elif recipe.cluster.num_nodes > 1 and transport != "broadcast":
        what = "a handle names memory" if transport == "ipc" else "the folder is on a disk"
        yield Problem(where, f"{what} of one machine, and there are several", "set it to auto or broadcast")


def _algorithm(recipe: Recipe) -> Iterator[Problem]:
    if recipe.grpo and recipe.sft:
        yield Problem("grpo, sft", "both are set", "a recipe trains in one way: set one of them to null")
    if not recipe.grpo and not recipe.sft:
        yield Problem("grpo, sft", "neither is set", "set grpo (or, for a supervised warm start, sft)")
    yield from trainer_problems(recipe)


def _nodes(recipe: Recipe) -> Iterator[Problem]:
    if recipe.cluster.num_nodes > 1:
        yield Problem(
            "cluster.num_nodes",
            f"{recipe.cluster.num_nodes}: this version starts its processes on one machine only",
            "set it to 1, and cluster.gpus_per_node to the GPUs of one machine",
        )


def _patterns(recipe: Recipe) -> Iterator[Problem]:
    """Regular expressions that do not compile, and an answer pattern without a group to hold the answer."""
    for where, pattern, groups in (
        ("data.train.question_pattern", recipe.data.train.question_pattern, 0),
        ("data.validation.question_pattern", recipe.data.validation.question_pattern, 0),
        ("env.reasoning_gym.answer_pattern", recipe.env.reasoning_gym.answer_pattern, 1),
    ):
        if pattern is None:
            continue
        try:
            found = re.compile(pattern).groups
        except re.error as error:
            yield Problem(where, f"{pattern!r} is not a regular expression: {error}", "correct it")
            continue
        if found < groups:
            yield Problem(where, f"{pattern!r} has no group", "put parentheses around the part that is the answer")


def _grpo(grpo: GRPOConfig, policy: PolicyConfig) -> Iterator[Problem]:
    rollouts = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if rollouts % policy.train_global_batch_size:
        yield Problem(
            "policy.train_global_batch_size",
            f"{policy.train_global_batch_size} does not divide the {rollouts} rollouts of a step "
            f"(num_prompts_per_step {grpo.num_prompts_per_step} x num_generations_per_prompt "
            f"{grpo.num_generations_per_prompt})",
            "the rollouts of a step must be a whole number of global batches: "
            f"try {' or '.join(map(str, _nearest_divisors(rollouts, policy.train_global_batch_size)))}",
        )
    if grpo.num_generations_per_prompt == 1:
        yield Problem(
            "grpo.num_generations_per_prompt",
            "1 response to a prompt has no other to be compared with: every advantage would be 0",
            "set it to at least 2",
        )


def _asynchrony(recipe: Recipe) -> Iterator[Problem]:
    grpo, loss = recipe.grpo, recipe.loss_fn
    if grpo is None or not grpo.async_grpo.enabled:
        return
    where = "grpo.async_grpo"
    if recipe.policy.generation.backend == "megatron":
        yield Problem(
            f"{where}.enabled",
            "the embedded sampler draws in the trainer's processes, so that it cannot draw while they train",
            "set policy.generation.backend to vllm, or this to false",
        )
    if not loss.use_importance_sampling_correction:
        yield Problem(
            f"{where}.enabled",
            "rollouts of older weights are trained on, and nothing corrects the loss for it",
            "set loss_fn.use_importance_sampling_correction to true",
        )
    if grpo.async_grpo.consumption == "ready_first" and grpo.async_grpo.max_trajectory_age_steps < 2:
        yield Problem(
            f"{where}.consumption",
            "ready_first passes groups over for a step, and max_trajectory_age_steps 1 leaves no step for that",
            f"set {where}.max_trajectory_age_steps to 2 or more, or consumption to in_order",
        )


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number` just below and just above `wanted`; one it shares with `wanted` if both are far."""
    far = 10_000  # of a mistyped, huge number not every divisor is sought
    near = range(max(1, wanted - far), min(number, wanted + far) + 1)
    divisors = [d for d in near if number % d == 0]
    below, above = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
    return [*below[-1:], *above[:1]] or [math.gcd(number, wanted)]


def _loss(recipe: Recipe) -> Iterator[Problem]:
    loss = recipe.loss_fn
    if loss.ratio_clip_c is not None and loss.ratio_clip_c <= 1 + loss.ratio_clip_max:
        yield Problem(
            "loss_fn.ratio_clip_c",
            f"the dual clip {loss.ratio_clip_c} must exceed 1 + ratio_clip_max = {1 + loss.ratio_clip_max}",
            "raise it (3 is usual), or set it to null",
        )
    yield from _importance(loss)
    for name, limit in loss.mismatch:
        if limit.warn is not None and limit.abort is not None and limit.abort < limit.warn:
            yield Problem(
                f"loss_fn.mismatch.{name}",
                f"abort {limit.abort:g} lies below warn {limit.warn:g}: there would never be a warning",
                "raise abort, or lower warn",
            )


def _importance(loss: LossConfig) -> Iterator[Problem]:
    kind, prefix = loss.truncated_importance_sampling_type, "loss_fn.truncated_importance_sampling"
    high, low = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
    if not loss.use_importance_sampling_correction:
        for name, given in (
            ("loss_fn.importance_sampling_level", loss.importance_sampling_level != "token"),
            (f"{prefix}_type", kind is not None),
        ):
            if given:
                yield Problem(
                    name,
                    "says how weights are made, and loss_fn.use_importance_sampling_correction is false",
                    "set that to true, or leave this out",
                )
    if kind is None:
        for name, bound in (("ratio", high), ("ratio_min", low)):
            if bound is not None:
                yield Problem(f"{prefix}_{name}", f"is a bound, and {prefix}_type is not set", "set that, or remove it")
        return
    if high is None:
        yield Problem(f"{prefix}_ratio", f"is missing: {kind} needs its upper bound", "set it (2 is usual)")
    if kind == "tis" and low is not None:
        yield Problem(f"{prefix}_ratio_min", "tis truncates from above only", "remove it, or take icepop")
    if kind != "tis" and low is None:
        yield Problem(f"{prefix}_ratio_min", f"is missing: {kind} needs its lower bound", "set it (0.5 is usual)")
    if high is not None and low is not None and low > high:
        yield Problem(f"{prefix}_ratio_min", f"{low:g} exceeds {prefix}_ratio {high:g}", "exchange them")


def _lengths(recipe: Recipe) -> Iterator[Problem]:
    policy, data = recipe.policy, recipe.data
    total = policy.max_total_sequence_length
    if data.max_input_seq_length + policy.generation.max_new_tokens > total:
        yield Problem(
            "policy.max_total_sequence_length",
            f"{total} tokens cannot hold a prompt of data.max_input_seq_length {data.max_input_seq_length} "
            f"and policy.generation.max_new_tokens {policy.generation.max_new_tokens}",
            f"set it to at least {data.max_input_seq_length + policy.generation.max_new_tokens}, or shorten the others",
        )
    yield from _microbatches(policy)


def _microbatches(policy: PolicyConfig) -> Iterator[Problem]:
    packing, dynamic, total = policy.sequence_packing, policy.dynamic_batching, policy.max_total_sequence_length
    if packing.enabled and dynamic.enabled:
        yield Problem(
            "policy.sequence_packing.enabled, policy.dynamic_batching.enabled",
            "both are true, and microbatches are made in one way",
            "set one of them to false",
        )
    for section, config in (("sequence_packing", packing), ("dynamic_batching", dynamic)):
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = getattr(config, name)
            if config.enabled and tokens is not None and tokens < total:
                yield Problem(
                    f"policy.{section}.{name}",
                    f"a microbatch of {tokens} tokens cannot hold a sequence of max_total_sequence_length {total}",
                    f"set it to at least {total}",
                )


def _data(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    for name in ("train", "validation"):
        yield from _dataset(f"data.{name}", getattr(data, name))
    if not re.search(r"\{\w+\}", data.prompt):
        yield Problem("data.prompt", f"{data.prompt!r} names no field of a row", "put {question} where it belongs")
    if data.env_name == "reasoning_gym":
        for name in ("train", "validation"):
            kind = getattr(data, name).dataset_name
            if kind != "reasoning_gym":
                yield Problem(
                    "data.env_name",
                    f"reasoning_gym judges only its own rows, and data.{name}.dataset_name is {kind}",
                    "set data.env_name to math, or the dataset to reasoning_gym",
                )
    yield from _held_out(data)


def _dataset(where: str, dataset: DatasetConfig) -> Iterator[Problem]:
    kind = dataset.dataset_name
    needed = {"reasoning_gym": ("task", "size"), "file": ("path",)}[kind]
    useless = {"reasoning_gym": ("path",), "file": ("task", "task_args", "size")}[kind]
    for name in needed:
        if getattr(dataset, name) is None:
            yield Problem(f"{where}.{name}", f"is missing: dataset_name {kind} needs it", "set it")
    for name in useless:
        if getattr(dataset, name):
            yield Problem(f"{where}.{name}", f"means nothing to dataset_name {kind}", "remove it (set it to null)")
    for name in {"seed", "size"} & dataset.task_args.keys():
        yield Problem(f"{where}.task_args.{name}", f"belongs to the dataset: {where}.{name}", f"set {where}.{name}")


def _held_out(data: DataConfig) -> Iterator[Problem]:
    """reasoning-gym draws row i of a dataset from seed + i, so neighbouring seeds share nearly all of their rows."""
    train, held_out = data.train, data.validation
    if train.task is None or train.task != held_out.task or train.size is None or held_out.size is None:
        return
    if train.seed < held_out.seed + held_out.size and held_out.seed < train.seed + train.size:
        yield Problem(
            "data.validation.seed",
            f"held-out rows are drawn from seeds {held_out.seed} to {held_out.seed + held_out.size - 1}, "
            f"training rows from {train.seed} to {train.seed + train.size - 1}: they overlap",
            f"set it to {train.seed + train.size} or more",
        )


def _sizes(recipe: Recipe) -> Iterator[Problem]:
    loop = recipe.grpo or recipe.sft
    held_out, train = recipe.data.validation.size, recipe.data.train.size
    if loop and held_out is not None and loop.max_val_samples > held_out:
        section = "grpo" if recipe.grpo else "sft"
        yield Problem(
            f"{section}.max_val_samples",
            f"{loop.max_val_samples} exceeds the {held_out} rows of data.validation",
            f"set it to at most {held_out}, or raise data.validation.size",
        )
    per_step = recipe.grpo.num_prompts_per_step if recipe.grpo else recipe.policy.train_global_batch_size
    if train is not None and per_step > train:
        yield Problem(
            "data.train.size",
            f"{train} rows are fewer than the {per_step} that one step takes",
            f"raise it to at least {per_step}",
        )
