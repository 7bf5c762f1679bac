"""Unknown keys, wrong types and impossible combinations: one error each, with path and mend."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.compose import resolve

IMPORTANCE = "loss_fn.use_importance_sampling_correction=true"


def error_of(*overrides: str, recipe: str = "tiny_arith") -> str:
    with pytest.raises(UserError) as error:
        resolve(recipe, overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "where", "mend"),
    [
        ("grpo.sed=3", "grpo.sed: unknown key (set by override)", "did you mean grpo.seed?"),
        ("polcy.precision=float32", "polcy: unknown key", "did you mean policy?"),
        ("num_prompts_per_step=3", "num_prompts_per_step: unknown key", "did you mean grpo.num_prompts_per_step?"),
        (
            "policy.generation.max_tokens=3",
            "policy.generation.max_tokens: unknown key",
            "policy.generation.max_new_tokens",
        ),
        ("data.train.foo=3", "data.train.foo: unknown key", "valid keys there: dataset_name, task,"),
        ("grpo.seed.x=3", "grpo.seed: should be a valid integer, is {'x': 3}", "correct it"),
    ],
)
def test_unknown_keys(override: str, where: str, mend: str) -> None:
    message = error_of(override)
    assert message.startswith(where)
    assert mend in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("grpo.max_num_steps=many", "grpo.max_num_steps: should be a valid integer, is 'many'"),
        ("grpo.max_num_steps=0", "grpo.max_num_steps: should be greater than 0, is 0"),
        ("grpo.max_num_steps=1.5", "grpo.max_num_steps: should be a valid integer"),
        ("grpo.max_num_steps='8'", "grpo.max_num_steps: should be a valid integer, is '8'"),
        ("grpo.max_num_steps=true", "grpo.max_num_steps: should be a valid integer, is True"),
        ("grpo.normalize_rewards=1", "grpo.normalize_rewards: should be a valid boolean, is 1"),
        ("grpo.normalize_rewards=yes", "grpo.normalize_rewards: should be a valid boolean, is 'yes'"),
        ("loss_fn.ratio_clip_min=-0.1", "loss_fn.ratio_clip_min: should be greater than or equal to 0, is -0.1"),
        ("policy.generation.temperature=0", "policy.generation.temperature: should be greater than 0, is 0"),
        ("policy.generation.temperature=.nan", "policy.generation.temperature: should be"),
        ("policy.max_grad_norm=.inf", "policy.max_grad_norm: should be"),
        ("policy=3", "policy: should be"),
        ("policy.generation.stop_token_ids=[1, x]", "policy.generation.stop_token_ids.1: should be a valid integer"),
        ("policy.precision=flaot32", "did you mean float32?"),
        ("policy.model_name=null", "policy.model_name: should be a valid string, is None"),
    ],
)
def test_wrong_types_and_values(override: str, expected: str) -> None:
    assert expected in error_of(override)


def test_missing_values() -> None:
    assert "grpo.max_num_steps: is missing" in error_of("grpo={seed: 3}", recipe="tiny_arith_warmstart")


def test_all_mistakes_at_once() -> None:
    message = error_of("grpo.sed=3", "policy.precision=x", "policy.megatron_cfg.optimizer.lrr=1")
    assert message.startswith("3 mistakes in tiny_arith v")
    for where in ("- grpo.sed:", "- policy.precision:", "- policy.megatron_cfg.optimizer.lrr:"):
        assert where in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sft.max_num_steps=3", "sft.max_val_samples=8"], "grpo, sft: both are set"),
        (["grpo=null"], "grpo, sft: neither is set"),
        (
            ["policy.megatron_cfg.enabled=false"],
            "policy.megatron_cfg.enabled, policy.dtensor_cfg.enabled: are both false",
        ),
        (["cluster.num_nodes=2"], "cluster.num_nodes: 2: this version starts its processes on one machine only"),
        # Covers: a batch that does not divide is cut or crashes.
        (["policy.train_global_batch_size=100"], "100 does not divide the 512 rollouts of a step"),
        (["policy.train_global_batch_size=100"], "try 64 or 128"),
        (["grpo.num_prompts_per_step=10000000000000000000001"], "try 202 or 356"),
        (["policy.train_global_batch_size=1024"], "try 512"),
        (
            [
                "grpo.num_generations_per_prompt=1",
                "policy.train_global_batch_size=64",
                "grpo.normalize_rewards=false",
                "grpo.drop_zero_variance_groups=false",
                "grpo.use_leave_one_out_baseline=false",
            ],
            "grpo.num_generations_per_prompt: 1 response",
        ),
        (["loss_fn.ratio_clip_c=1.28"], "loss_fn.ratio_clip_c: the dual clip 1.28 must exceed"),
        (
            ["loss_fn.importance_sampling_level=sequence"],
            "loss_fn.importance_sampling_level: says how weights are made",
        ),
        (["loss_fn.truncated_importance_sampling_ratio=2"], "loss_fn.truncated_importance_sampling_ratio: is a bound"),
        ([IMPORTANCE, "loss_fn.truncated_importance_sampling_type=tis"], "sampling_ratio: is missing: tis needs"),
        ([IMPORTANCE, "loss_fn.truncated_importance_sampling_type=icepop"], "ratio_min: is missing: icepop needs"),
        (["loss_fn.max_sequence_mult_prob_error=0.9"], "loss_fn.max_sequence_mult_prob_error"),
        (
            ["loss_fn.mismatch.gen_kl_error.warn=2", "loss_fn.mismatch.gen_kl_error.abort=1"],
            "loss_fn.mismatch.gen_kl_error: abort 1 lies below warn 2",
        ),
        (["policy.generation.num_engines=2"], "policy.generation.num_engines: is 2, and the embedded sampler has no"),
        (
            ["policy.generation.backend=vllm", "policy.generation.num_engines=2", "cluster.gpus_per_node=1"],
            "policy.generation.num_engines: is 2, and on GPUs an engine shares the trainer's",
        ),
        (["data.max_input_seq_length=93"], "policy.max_total_sequence_length: 96 tokens cannot hold"),
        (["policy.sequence_packing.train_mb_tokens=95"], "policy.sequence_packing.train_mb_tokens: a microbatch of 95"),
        (["policy.sequence_packing.logprob_mb_tokens=95"], "policy.sequence_packing.logprob_mb_tokens: a microbatch"),
        (
            ["policy.dynamic_batching.enabled=true"],
            "policy.sequence_packing.enabled, policy.dynamic_batching.enabled: both are true",
        ),
        (
            [
                "policy.sequence_packing.enabled=false",
                "policy.dynamic_batching.enabled=true",
                "policy.dynamic_batching.train_mb_tokens=95",
            ],
            "policy.dynamic_batching.train_mb_tokens: a microbatch of 95",
        ),
        (["policy.megatron_cfg.sequence_parallel=true"], "policy.megatron_cfg.sequence_parallel: splits"),
        (["policy.megatron_cfg.tensor_model_parallel_size=2"], "x context_parallel_size 1 need groups of 2 processes"),
        (["policy.megatron_cfg.fp8=hybrid"], "needs TransformerEngine, which needs a GPU"),
        (["data.train.task=null"], "data.train.task: is missing: dataset_name reasoning_gym needs it"),
        (["data.train.size=null"], "data.train.size: is missing"),
        (["data.train.path=x"], "data.train.path: means nothing to dataset_name reasoning_gym"),
        (["data.train.task_args.seed=1"], "data.train.task_args.seed: belongs to the dataset"),
        (["data.validation.dataset_name=file"], "data.validation.path: is missing: dataset_name file needs it"),
        (["data.validation.dataset_name=file"], "data.env_name: reasoning_gym judges only its own rows"),
        (["data.prompt=Question:"], "data.prompt: 'Question:' names no field of a row"),
        (["grpo.max_val_samples=100000"], "grpo.max_val_samples: 100000 exceeds"),
        (["data.train.question_pattern=("], "data.train.question_pattern: '(' is not a regular expression"),
        (["env.reasoning_gym.answer_pattern=x"], "env.reasoning_gym.answer_pattern: 'x' has no group"),
        (["loss_fn.ratio_clip_min=1.5"], "loss_fn.ratio_clip_min"),
        (["policy.generation.stop_token_ids=[]"], "policy.generation.stop_token_ids"),
        (["checkpointing.metric_name=val/accurcy"], "checkpointing.metric_name"),
        (["grpo.seed=99999999999999999999999"], "grpo.seed"),
        (["cluster.cpu_threads=100000"], "cluster.cpu_threads"),
        (["data.train.size=10"], "data.train.size: 10 rows are fewer than the 64"),
    ],
)
def test_impossible_combinations(overrides: Sequence[str], expected: str) -> None:
    assert expected in error_of(*TINY, *overrides)


# The recipe's own numbers may move; these tests speak of these.
TINY = (
    "grpo.num_prompts_per_step=64",
    "grpo.num_generations_per_prompt=8",
    "grpo.normalize_rewards=true",
    "grpo.use_leave_one_out_baseline=false",
    "grpo.drop_zero_variance_groups=true",
    "policy.train_global_batch_size=256",
    "policy.max_total_sequence_length=96",
    "data.max_input_seq_length=92",
    "policy.generation.max_new_tokens=4",
    "loss_fn.ratio_clip_max=0.28",
    "data.train.seed=0",
    "data.train.size=1000",
    "data.validation.seed=1000000",
    "data.validation.size=256",
    "grpo.max_val_samples=256",
)


def test_the_unchanged_numbers_are_valid() -> None:
    assert resolve("tiny_arith", TINY).recipe.data.train.size == 1000


@pytest.mark.parametrize(("seed", "overlap"), [(0, True), (999, True), (1000, False)])
def test_held_out_rows_are_disjoint(seed: int, overlap: bool) -> None:
    """reasoning-gym draws row i from seed + i, so that unequal seeds are not enough."""
    import reasoning_gym

    overrides = [*TINY, f"data.validation.seed={seed}"]
    train = reasoning_gym.create_dataset("chain_sum", size=1000, seed=0)
    held_out = reasoning_gym.create_dataset("chain_sum", size=1, seed=seed)
    assert (held_out[0]["question"] in {row["question"] for row in train}) is overlap
    if overlap:
        assert "they overlap" in error_of(*overrides)
    else:
        resolve("tiny_arith", overrides)
