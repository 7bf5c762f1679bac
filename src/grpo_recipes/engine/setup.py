"""From a validated recipe to the parts of a run. Everything that can be wrong with the inputs is found here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from grpo_recipes.cluster.contract import Placement, WorkerGroup
from grpo_recipes.cluster.world import find_world, start_workers
from grpo_recipes.data.dataset import Dataset, load_datasets
from grpo_recipes.data.prompts import encode_dataset, encode_text
from grpo_recipes.data.tokenizer import chat_template_digest, load_tokenizer, tokenizer_digest
from grpo_recipes.engine.drawn_rollouts import DrawnRollouts
from grpo_recipes.engine.generators import check_generator, open_generator
from grpo_recipes.engine.halves import check_source
from grpo_recipes.engine.importance import Correction
from grpo_recipes.engine.inbox import Inbox
from grpo_recipes.engine.losses import cross_entropy_loss, policy_loss
from grpo_recipes.engine.packing import Counted, Packed, Similar, Strategy
from grpo_recipes.engine.parts import Parts, Prompts
from grpo_recipes.engine.policy_group import PolicyGroup
from grpo_recipes.engine.rollout_source import RolloutSource
from grpo_recipes.engine.stored_rollouts import ReplayedRollouts
from grpo_recipes.engine.worker import Worker
from grpo_recipes.environments.factory import make_environment
from grpo_recipes.errors import UserError
from grpo_recipes.generation.contract import Generator
from grpo_recipes.policy.alignment import alignment_of
from grpo_recipes.policy.contract import Loss
from grpo_recipes.recipe.model_flops import model_shape, sequence_cost
from grpo_recipes.recipe.model_folder import ModelFacts, check_model, read_json
from grpo_recipes.recipe.schema import LossConfig, PolicyConfig, Recipe
from grpo_recipes.runs.arrivals import read_arrivals
from grpo_recipes.runs.files import folder_sha256
from grpo_recipes.runs.folder import RunFolder
from grpo_recipes.runs.mode import WHOLE, Mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_recipes.policy.dtensor.decode import WholeModel as DTensorWholeModel
    from grpo_recipes.policy.dtensor.trainer import DTensorPolicy
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy
    from grpo_recipes.policy.megatron.whole_model import WholeModel as MegatronWholeModel


@contextmanager
def open_parts(
    recipe: Recipe, check_stop: Callable[[str], None], mode: Mode = WHOLE, name: str = ""
) -> Iterator[tuple[Parts, int, dict[str, Any]]]:
    """Parts of the run, its last step, and the digests of its inputs; worker processes end with the block.

    Args:
        name: of the recipe, to compare with that of the run that `mode` names.

    Raises:
        UserError: model, tokenizer, data or environment cannot be used.
    """
    world = find_world(recipe.cluster)
    facts = check_model(recipe.policy)
    on_gpu = world.device == "cuda"
    draws = mode.kind != "train-only"
    if draws:
        check_generator(recipe, facts.folder, on_gpu=on_gpu)
    environment = make_environment(recipe.env, recipe.data)  # first: its processes start while the rest is loaded
    try:
        tokenizer = load_tokenizer(facts.tokenizer_folder, recipe.policy.trust_remote_code)
        rows = load_datasets(recipe.data)
        train, train_rows = prompts_of(rows[0], recipe, tokenizer, "train")
        validation, validation_rows = prompts_of(rows[1], recipe, tokenizer, "validation")
        if recipe.sft:
            check_answers(train, tokenizer, recipe.policy.max_total_sequence_length)
        last = last_step(recipe, len(train))
        inputs = input_digests(facts, tokenizer, train_rows, validation_rows)
        source = None
        if mode.source is not None:
            source = check_source(mode.source, name, recipe.model_dump(mode="json"), inputs)
        rollouts: RolloutSource | None = (
            None if draws or source is None else ReplayedRollouts(recipe, train, source, tokenizer, last_step=last)
        )
        policy = recipe.policy
        factory = partial(
            make_worker,
            policy=policy,
            model_folder=facts.folder,
            max_positions=facts.max_positions,
            optimizer_steps=last * optimizer_steps_per_batch(recipe),
            needs_reference=recipe.loss_fn.reference_policy_kl_penalty > 0,
            seed=recipe.plan.seed,
            draws=draws,
        )
        with (
            start_workers(factory, world, recipe.cluster.cpu_threads) as workers,
            generator_of(recipe, workers, facts.folder, on_gpu=on_gpu, draws=draws) as (generator, refit),
        ):
            train_strategy, logprob_strategy = make_strategies(policy, facts.folder)
            group = PolicyGroup(workers, train_strategy=train_strategy, logprob_strategy=logprob_strategy)
            inbox = None if generator is None else Inbox(generator)
            if recipe.grpo and inbox:
                rollouts = DrawnRollouts(
                    recipe,
                    train,
                    inbox,
                    tokenizer,
                    facts.stop_token_ids,
                    last_step=last,
                    refit=refit,
                    check_stop=check_stop,
                    order=None if source is None else recorded_order(source),
                )
            parts = Parts(
                recipe=recipe,
                tokenizer=tokenizer,
                stop_token_ids=facts.stop_token_ids,
                train=train,
                validation=validation,
                environment=environment,
                inbox=inbox,
                rollouts=rollouts,
                policy=group,
                loss=make_loss(recipe),
                correction=correction_of(recipe.loss_fn),
                refit=refit,
                check_stop=check_stop,
            )
            yield parts, last, inputs
    finally:
        environment.close()


@contextmanager
def generator_of(
    recipe: Recipe, workers: WorkerGroup, model_folder: Path, *, on_gpu: bool, draws: bool
) -> Iterator[tuple[Generator | None, Callable[[int], Any]]]:
    """None, and a refit that does nothing, where nothing is drawn."""
    if not draws:
        yield None, lambda version: None
        return
    with open_generator(recipe, workers, model_folder, on_gpu=on_gpu) as opened:
        yield opened


def recorded_order(source: RunFolder) -> dict[int, tuple[int, ...]]:
    """{step, counted from 0: its groups}"""
    return {step - 1: groups for step, groups in read_arrivals(source).items()}


def prompts_of(
    dataset: Dataset, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, role: str
) -> tuple[Prompts, Dataset]:
    kept, prompt_ids = encode_dataset(dataset, recipe.data, tokenizer, role)
    for reason, count in kept.excluded.items():
        print(f"data.{role}: {count} rows left out: {reason}", flush=True)
    return Prompts(kept, prompt_ids), kept


def check_answers(train: Prompts, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
    """Supervised training: each prompt, its answer and a stop token are at most so many tokens, or UserError."""
    for example, prompt in zip(train.examples, train.prompt_ids, strict=True):
        length = len(prompt) + len(encode_text(example.answer, tokenizer, "answer")) + 1
        if length > most:
            raise UserError(
                f"{most} tokens cannot hold the {length} of prompt, answer and stop token of {example.question[:60]!r}",
                where="policy.max_total_sequence_length",
                mend=f"set it to at least {length}, or use shorter answers",
            )


def make_worker(
    placement: Placement,
    *,
    policy: PolicyConfig,
    model_folder: Path,
    max_positions: int,
    optimizer_steps: int,
    needs_reference: bool,
    seed: int,
    draws: bool = True,
) -> Worker:
    from grpo_recipes.generation.megatron.sampler import MegatronSampler

    trainer = trainer_class(policy)(
        policy,
        temperature=policy.generation.temperature,
        total_optimizer_steps=optimizer_steps,
        model_folder=model_folder,
        needs_reference=needs_reference,
        seed=seed,
    )
    if not draws or policy.generation.backend == "vllm":
        return Worker(trainer, None, "vllm" if draws else "none")
    copy = copy_for_sampling(policy, model_folder, placement.device)
    sampler = MegatronSampler(
        copy.decoder if copy else cast("MegatronPolicy", trainer).decoder,
        max_batch_size=policy.generation.max_batch_size,
        max_positions=max_positions,
        take_weights=copy.take if copy else None,
        device=placement.device,
    )
    worker = Worker(trainer, sampler, "copy" if copy else "shared", copy.held if copy else None)
    worker.refit(0)
    return worker


def trainer_class(policy: PolicyConfig) -> type[MegatronPolicy] | type[DTensorPolicy]:
    """The one that the recipe enables."""
    if policy.dtensor_cfg.enabled:
        from grpo_recipes.policy.dtensor.trainer import DTensorPolicy

        return DTensorPolicy
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    return MegatronPolicy


def copy_for_sampling(
    policy: PolicyConfig, model_folder: Path, device: str
) -> MegatronWholeModel | DTensorWholeModel | None:
    """A whole model for the embedded sampler; None where it samples from the trainer's own."""
    if policy.dtensor_cfg.enabled:
        from grpo_recipes.policy.dtensor.decode import WholeModel as DTensorWholeModel

        return DTensorWholeModel(policy, model_folder, device)
    from grpo_recipes.policy.megatron.whole_model import WholeModel as MegatronWholeModel
    from grpo_recipes.policy.megatron.whole_model import needs_copy

    return MegatronWholeModel(policy, model_folder) if needs_copy(policy.megatron_cfg) else None


def make_strategies(policy: PolicyConfig, model_folder: Path) -> tuple[Strategy, Strategy]:
    """Which sequences run together in training, and in logprob passes."""
    packing, dynamic, megatron = policy.sequence_packing, policy.dynamic_batching, policy.megatron_cfg
    align = alignment_of(megatron if megatron.enabled else policy.dtensor_cfg)
    pipeline = megatron.enabled and megatron.pipeline_model_parallel_size > 1
    shape = model_shape(read_json(model_folder / "config.json"))
    cost = partial(sequence_cost, shape=shape)

    def strategy(sequences: int, packed_tokens: int | None, dynamic_tokens: int | None) -> Strategy:
        default = policy.max_total_sequence_length * sequences
        if packing.enabled:
            return Packed(packed_tokens or default, align, cost, pipeline=pipeline)
        if dynamic.enabled:
            return Similar(dynamic_tokens or default, dynamic.sequence_length_round, align, cost)
        return Counted(sequences, align, cost)

    return (
        strategy(policy.train_micro_batch_size, packing.train_mb_tokens, dynamic.train_mb_tokens),
        strategy(policy.logprob_batch_size, packing.logprob_mb_tokens, dynamic.logprob_mb_tokens),
    )


def make_loss(recipe: Recipe) -> Loss:
    if recipe.sft:
        return cross_entropy_loss
    loss = recipe.loss_fn
    return partial(
        policy_loss,
        clip_min=loss.ratio_clip_min,
        clip_max=loss.ratio_clip_max,
        dual_clip=loss.ratio_clip_c,
        kl_penalty=loss.reference_policy_kl_penalty,
        kl_type=loss.reference_policy_kl_type,
    )


def correction_of(loss: LossConfig) -> Correction | None:
    """How losses are corrected for the distribution that tokens were drawn by; None where they are not."""
    if not loss.use_importance_sampling_correction and loss.max_sequence_mult_prob_error is None:
        return None
    high = loss.truncated_importance_sampling_ratio
    return Correction(
        level=loss.importance_sampling_level if loss.use_importance_sampling_correction else "none",
        bound=loss.truncated_importance_sampling_type,
        low=loss.truncated_importance_sampling_ratio_min or 0.0,
        high=math.inf if high is None else high,
        max_sequence_error=loss.max_sequence_mult_prob_error,
    )


def optimizer_steps_per_batch(recipe: Recipe) -> int:
    if recipe.grpo is None:
        return 1
    rollouts = recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt
    return rollouts // recipe.policy.train_global_batch_size


def last_step(recipe: Recipe, prompts: int) -> int:
    """max_num_steps, or fewer if max_num_epochs over the training prompts end before."""
    if recipe.grpo is None:
        assert recipe.sft is not None
        return recipe.sft.max_num_steps
    if recipe.grpo.max_num_epochs is None:
        return recipe.grpo.max_num_steps
    by_epochs = recipe.grpo.max_num_epochs * prompts // recipe.grpo.num_prompts_per_step
    if by_epochs == 0:
        raise UserError(
            f"{prompts} prompts are less than one step of {recipe.grpo.num_prompts_per_step}",
            where="grpo.max_num_epochs",
            mend="raise it, leave it out, or lower grpo.num_prompts_per_step",
        )
    return min(recipe.grpo.max_num_steps, by_epochs)


def input_digests(
    facts: ModelFacts, tokenizer: PreTrainedTokenizerBase, train: Dataset, validation: Dataset
) -> dict[str, Any]:
    return {
        "model": folder_sha256(facts.folder),
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": chat_template_digest(tokenizer),
        "train_rows": train.digest(),
        "validation_rows": validation.digest(),
        "rows": {"train": len(train), "validation": len(validation)},
        "left_out": {"train": dict(train.excluded), "validation": dict(validation.excluded)},
    }
