"""The typed recipe. Key names are NeMo-RL's wherever the meaning is the same.

Frozen pydantic models that forbid unknown keys; combinations that cannot work are refused in recipe/checks.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class AsyncConfig(Section):
    """enabled: rollouts are drawn while the trainer trains. It needs a generator outside the trainer's processes."""

    enabled: bool = False
    max_trajectory_age_steps: PositiveInt = 1  # steps between the weights that began a rollout and those it trains
    in_flight_weight_updates: bool = False  # unfinished rollouts go on with new weights; else these wait for them
    # A step takes the groups that are next in the data, or those that are ready first (within the age).
    consumption: Literal["in_order", "ready_first"] = "in_order"


class DeadlineConfig(Section):
    """Samples that a step has waited for so long are asked for anew, or left out of their groups."""

    seconds: PositiveFloat | None = None  # of waiting for rollouts in one step; default: no deadline
    max_replacements: NonNegativeInt = 0  # of a sample, each with a seed and a wait of its own; then it is left out


class GRPOConfig(Section):
    """The outer loop."""

    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 16
    max_num_steps: PositiveInt
    max_num_epochs: PositiveInt | None = None
    normalize_rewards: bool = True  # divide advantages by the group's standard deviation
    use_leave_one_out_baseline: bool = True
    drop_zero_variance_groups: bool = False  # such groups leave the loss and its denominator
    val_period: NonNegativeInt = 10  # steps; 0: never
    val_at_start: bool = True
    val_at_end: bool = True
    max_val_samples: PositiveInt = 256  # held-out problems per evaluation
    val_greedy: bool = False  # evaluate the most likely answers, too
    seed: Seed = 42
    max_bad_steps: NonNegativeInt = 3  # consecutive optimizer steps skipped for a non-finite value before the run stops
    shuffle_rewards: bool = False  # a control: rewards permuted within each batch; nothing can be learnt
    async_grpo: AsyncConfig = AsyncConfig()
    rollout_deadline: DeadlineConfig = DeadlineConfig()
    rollout_watchdog_s: PositiveFloat = 1800.0  # without any rollout arriving, after which the run ends with an error


class SFTConfig(Section):
    """Supervised warm start: cross entropy on reference answers, through the same trainer."""

    max_num_steps: PositiveInt
    val_period: NonNegativeInt = 0
    val_at_start: bool = False
    val_at_end: bool = True
    max_val_samples: PositiveInt = 256
    seed: Seed = 42
    max_bad_steps: NonNegativeInt = 3


class Limit(Section):
    """Above `warn` a warning; above `abort` the run ends before the batch is trained on."""

    warn: NonNegativeFloat | None = None
    abort: NonNegativeFloat | None = None


class MismatchLimits(Section):
    """Of sampler and trainer, by the metrics' names (docs/mismatch.md)."""

    token_mult_prob_error: Limit = Limit(warn=1.05)  # NeMo-RL's for a new model (docs/mismatch.md)
    gen_kl_error: Limit = Limit()
    sequence_mult_prob_error_max: Limit = Limit()
    masked_token_fraction: Limit = Limit()


class LossConfig(Section):
    reference_policy_kl_penalty: NonNegativeFloat = 0.0
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    ratio_clip_min: Fraction = 0.2
    ratio_clip_max: NonNegativeFloat = 0.2
    ratio_clip_c: PositiveFloat | None = None  # dual clip; must exceed 1 + ratio_clip_max
    token_level_loss: bool = True  # false: mean over each sequence's tokens, then over sequences
    # Weigh each token's loss by trainer / sampler probability (engine/importance.py has the formulas).
    use_importance_sampling_correction: bool = False
    importance_sampling_level: Literal["token", "sequence", "geometric"] = "token"
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: PositiveFloat | None = None  # the upper bound
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None  # the lower bound of icepop, seq-mask-tis
    # Sequences with a larger mean of exp|trainer - sampler logprob| are masked; at least 1.
    max_sequence_mult_prob_error: Annotated[float, Field(ge=1)] | None = None
    mismatch: MismatchLimits = MismatchLimits()


class SequencePackingConfig(Section):
    """enabled: microbatches hold up to so many tokens. Without it and without dynamic batching they hold
    train_micro_batch_size (logprob_batch_size) sequences, whatever their lengths. Sequences always lie end to end,
    padded only as far as parallelism asks for (policy/alignment.py)."""

    enabled: bool = True
    # Tokens per packed microbatch; default: max_total_sequence_length x the micro batch size of training or logprobs.
    train_mb_tokens: PositiveInt | None = None
    logprob_mb_tokens: PositiveInt | None = None


class DynamicBatchingConfig(Section):
    """enabled: instead of packing, microbatches hold sequences of similar length, so many that their number x the
    longest length, rounded up, is at most so many tokens."""

    enabled: bool = False
    train_mb_tokens: PositiveInt | None = None  # defaults as for packing
    logprob_mb_tokens: PositiveInt | None = None
    sequence_length_round: PositiveInt = 64  # tokens


class TokenizerConfig(Section):
    name: str | None = None  # default: the model's folder


class MegatronConfig(BaseModel):
    """policy.megatron_cfg. Any further key must be a field of Megatron-Core's TransformerConfig (recipe/megatron.py)."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    enabled: bool = True
    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    # Layers of TransformerEngine, or Megatron-Core's own with this project's attention; auto: TransformerEngine's where
    # it is installed and precision is bfloat16.
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    activation_checkpointing: bool = False  # recompute every layer, unless recompute_granularity says otherwise
    freeze_moe_router: bool = False  # routers keep the weights they were loaded with
    # Unused GPU memory goes back to the device: 1 after the backward pass, 2 after the optimizer's step, too.
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    optimizer: dict[str, Any] = Field(default_factory=dict)  # fields of OptimizerConfig
    scheduler: dict[str, Any] = Field(default_factory=dict)  # recipe/megatron.py lists it; unit: optimizer steps
    distributed_data_parallel_config: dict[str, Any] = Field(default_factory=dict)


class DTensorConfig(BaseModel):
    """policy.dtensor_cfg: transformers' model under FSDP2 and DTensor instead of Megatron-Core (recipe/dtensor.py).
    Optimizer and schedule are those of policy.megatron_cfg.optimizer and .scheduler: one set for both trainers."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    enabled: bool = False
    tensor_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    activation_checkpointing: bool = False  # recompute every layer
    cpu_offload: bool = False  # weights, gradients and optimizer in host memory, where the optimizer then steps
    torch_compile: bool = False  # of each layer, around its attention


class RefitConfig(Section):
    """How a generator outside the trainer's processes gets new weights (docs/refit.md)."""

    # ipc: a buffer that both see (CUDA IPC; shared memory on CPUs). auto: ipc on one node, broadcast on several.
    transport: Literal["auto", "ipc", "broadcast", "safetensors"] = "auto"
    # Prove that the weights arrived, for the first two refits of a run and after each restart, for every one, or never.
    certify: Literal["first_two", "every", "never"] = "first_two"


class GenerationConfig(Section):
    backend: Literal["megatron", "vllm"] = "megatron"  # the embedded sampler, or an engine in a process of its own
    max_new_tokens: PositiveInt
    temperature: PositiveFloat = 1.0
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = (
        None  # default: the tokenizer's end of sequence
    )
    max_batch_size: PositiveInt = 512  # sequences decoded at once
    num_engines: PositiveInt = 1  # of vLLM
    max_engine_restarts: NonNegativeInt = 3  # of vLLM's engines together; then the run ends
    vllm_cfg: dict[str, Any] = Field(default_factory=dict)  # arguments of vLLM's engine (recipe/vllm.py)
    refit: RefitConfig = RefitConfig()


class PolicyConfig(Section):
    model_name: str  # folder, hub name, or recipe:<recipe>/<folder>
    model_revision: str | None = None
    trust_remote_code: bool = False
    initial_weights: Literal["pretrained", "random"] = "pretrained"
    init_seed: Seed = 0  # of random initial weights
    tokenizer: TokenizerConfig = TokenizerConfig()
    train_global_batch_size: PositiveInt  # sequences per optimizer step
    train_micro_batch_size: PositiveInt = 1
    logprob_batch_size: PositiveInt = 1
    max_total_sequence_length: PositiveInt
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    max_grad_norm: PositiveFloat = 1.0
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()
    dtensor_cfg: DTensorConfig = DTensorConfig()
    generation: GenerationConfig


class DatasetConfig(Section):
    """dataset_name reasoning_gym: procedural `task` with `task_args`, `size` rows from `seed`.
    dataset_name file: JSONL, Parquet or Arrow at `path`, with the named columns."""

    dataset_name: Literal["reasoning_gym", "file"]
    task: str | None = None
    task_args: dict[str, Any] = Field(default_factory=dict)
    size: PositiveInt | None = None
    seed: Seed = 0
    path: str | None = None
    question_column: str = "question"
    answer_column: str = "answer"
    question_pattern: str | None = None  # regular expression; only rows whose question contains a match are kept


class DataConfig(Section):
    train: DatasetConfig
    validation: DatasetConfig
    prompt: str = "{question}"  # template; fields of a reasoning-gym entry's metadata work, too, e.g. {expression}
    system_prompt: str | None = None
    apply_chat_template: bool = True
    max_input_seq_length: PositiveInt  # tokens; longer prompts are filtered out and counted
    shuffle: bool = True
    env_name: Literal["reasoning_gym", "math"]


class MathEnvConfig(Section):
    num_workers: PositiveInt = 2
    timeout_s: PositiveFloat = 10.0  # per response


class ReasoningGymEnvConfig(Section):
    num_workers: PositiveInt = 1
    timeout_s: PositiveFloat = 10.0  # per response
    answer_pattern: str | None = None  # regular expression whose first group is the answer; default: the whole response


class EnvConfig(Section):
    math: MathEnvConfig = MathEnvConfig()
    reasoning_gym: ReasoningGymEnvConfig = ReasoningGymEnvConfig()


class CheckpointingConfig(Section):
    enabled: bool = True
    async_save: bool = False  # write in the background: a step waits for a copy to host memory, which is kept
    save_period: PositiveInt = 10
    keep_last: PositiveInt = 2
    keep_top_k: NonNegativeInt = 1
    metric_name: Literal["val/accuracy", "val/greedy_accuracy", "val/reward"] = "val/accuracy"
    higher_is_better: bool = True


class LoggerConfig(Section):
    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False
    trackio: bool = False
    project: str = "grpo-recipes"
    load_of_every_expert: bool = False  # a metric for each expert of each layer, besides the largest and the smallest
    num_rollouts_to_keep: NonNegativeInt = 8  # rollouts written as text per step
    num_rollout_steps_to_store: NonNegativeInt = 2  # last steps of which all rollouts are kept (runs/rollout_store.py)


class ClusterConfig(Section):
    num_nodes: PositiveInt = 1
    gpus_per_node: NonNegativeInt = 0  # a process for each; 0: processes on the CPU
    cpu_processes: PositiveInt | None = (
        None  # with gpus_per_node 0; default: one process, on a GPU only if there happens to be one
    )
    cpu_threads: Annotated[int, Field(gt=0, le=256)] | None = (
        None  # of a process's tensor operations; default: its share of the cores
    )


class Recipe(Section):
    """A whole recipe. Exactly one of `grpo` and `sft` is set."""

    description: str
    stack: str  # id of the pinned stack in containers/stack.yaml
    grpo: GRPOConfig | None = None
    sft: SFTConfig | None = None
    loss_fn: LossConfig = LossConfig()
    policy: PolicyConfig
    data: DataConfig
    env: EnvConfig = EnvConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def plan(self) -> GRPOConfig | SFTConfig:
        """The one of `grpo` and `sft` that is set: what both have in common (steps, evaluation, seed)."""
        plan = self.grpo or self.sft
        assert plan is not None  # checks.py refuses a recipe with neither
        return plan
