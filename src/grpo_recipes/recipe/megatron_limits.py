"""Fields of Megatron-Core that a recipe cannot set here, each with its reason, and what the others need.

Five tables, keyed by Megatron-Core's class and field:

    DERIVED  the engine fills it, so that setting it could only contradict it
    FIXED    only one value works
    REFUSED  only Megatron-Core's default works
    INERT    any value is handed on, and has no effect here
    NEEDS    any value but the default needs TransformerEngine ("te") or a GPU ("gpu")

and OTHER_NAMES: keys of NeMo-RL's megatron_cfg that are no fields of Megatron-Core.
"""

from __future__ import annotations

from typing import Any, Literal

_MODEL = "it is read from the model's config.json"
_PRECISION = "it follows policy.precision"
_ENGINE = "the engine sets it"
_LOSS = "the engine's loss already carries its global denominator"
_BAD_STEPS = "the engine skips and counts steps that are not finite (grpo.max_bad_steps)"
_REPEAT = "logprobs must repeat, so nothing random may happen in the model"
_WEIGHTS = "every weight is loaded by name, or drawn with the initializer_range of config.json"


def _names(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


DERIVED: dict[str, dict[str, str]] = {
    "TransformerConfig": {
        **_names(
            _MODEL,
            "num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size layernorm_epsilon "
            "layernorm_zero_centered_gamma normalization gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm "
            "rotary_interleaved num_moe_experts moe_ffn_hidden_size moe_router_topk multi_latent_attention "
            "moe_layer_freq moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor",
        ),
        **_names(_PRECISION, "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype"),
        "calculate_per_token_loss": _LOSS,
        **_names(_ENGINE, "variable_seq_lengths timers use_cpu_initialization perform_initialization"),
        **_names(_REPEAT, "hidden_dropout attention_dropout"),
        "microbatch_group_size_per_vp_stage": "the engine makes microbatches a multiple of the pipeline's stages",
    },
    "OptimizerConfig": {
        **_names(_PRECISION, "params_dtype bf16 fp16"),
        "clip_grad": "set policy.max_grad_norm",
        "timers": _ENGINE,
        "fp8_recipe": "it follows policy.megatron_cfg.fp8_recipe",
        "overlap_param_gather": "it follows policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
    },
    "DistributedDataParallelConfig": {
        "use_distributed_optimizer": "it follows policy.megatron_cfg.optimizer.use_distributed_optimizer",
        "average_in_collective": _LOSS,
        **_names(_BAD_STEPS, "check_for_nan_in_grad check_for_large_grads"),
    },
    "OptimizerParamScheduler": {
        "max_lr": "set policy.megatron_cfg.optimizer.lr",
        "min_lr": "set policy.megatron_cfg.optimizer.min_lr",
        "wd_incr_steps": "it is the number of optimizer steps of the run",
        **_names(
            "a resumed run goes on with the schedule of its recipe",
            "use_checkpoint_opt_param_scheduler override_opt_param_scheduler",
        ),
    },
}

FIXED: dict[str, tuple[Any, str]] = {
    "apply_rope_fusion": (False, "positions are rotated outside Megatron-Core, unfused"),
    "optimizer": ("adam", "checkpoints hold the two moments of Adam"),
    "use_distributed_optimizer": (True, "checkpoints are written from the distributed optimizer's shards"),
    "store_param_remainders": (False, "checkpoints hold whole float32 weights"),
    "main_params_dtype": ("float32", "weights that training has rounded further could not be resumed exactly"),
}

_NO_VARIANT = "no supported model family has it"
_OWN_ATTENTION = "the engine's attention module has no such variant"
_SPEC = "the layers are built without it"
_INFERENCE = "it belongs to Megatron-Core's inference engine, which is not used"
_GRAPHS = "CUDA graphs need batches of one shape, and the number of tokens varies"
_USER_BUFFERS = "TransformerEngine's user buffers need batches of one shape, and the number of tokens varies"
_MAPPING = "the mapping from and to Hugging Face covers tensor, pipeline and expert parallelism only"
_OWN_CONTEXT = "context parallelism cuts every sequence into zigzag chunks over all context-parallel ranks"
_OWN_LOSS = "the engine computes logprobs itself, in chunks of the vocabulary-parallel logits"
_NOT_IN_STACK = "what it needs is not in the pinned stack"
_SCHEDULE_PLAN = (
    "it needs Megatron-Core's own schedule of a layer's parts, which the engine's forward step does not use"
)
_EXPORT = "a Hugging Face checkpoint of the supported families has no place for it"
_NO_TIMERS = "Megatron-Core's timers are not used; the metrics time every phase"
_LOW_PRECISION_PARAMETERS = "weights are exchanged with Hugging Face and the sampler in policy.precision"
_FRESH = "weights are read right after an optimizer step (refit, checkpoints), when they would still be stale"
_FSDP = "Megatron's FSDP stores parameters in another layout than checkpoints and refit read"
_OTHER_OPTIMIZER = "the optimizer is adam"
_GROUPS = "process groups are NCCL's on GPUs and gloo's on CPUs, one for each parallel dimension"
_FP16 = "losses are scaled only for float16, which is not supported"
_NO_USER_BUFFERS = "tp_comm_overlap is off"
_NO_FLEX = "the flex dispatcher is not used"
_NO_BIAS = "experts have no bias for balancing"
_NO_FSDP = "Megatron's FSDP is not used"

REFUSED: dict[str, dict[str, str]] = {
    "TransformerConfig": {
        **_names(
            _MAPPING,
            "tensor_parallel_num_weight_shards gtp_weight_remat_size "
            "expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size "
            "moe_single_grouped_weight moe_single_grouped_bias moe_mlp_glu_interleave_size",
        ),
        "pipeline_model_parallel_comm_backend": _GROUPS,
        **_names(
            _OWN_CONTEXT,
            "hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank",
        ),
        **_names(
            _WEIGHTS,
            "init_method_std embedding_init_method_std init_model_with_meta_device",
        ),
        "num_microbatches_with_partial_activation_checkpoints": "every microbatch is recomputed alike",
        **_names(
            _USER_BUFFERS,
            "tp_comm_overlap symmetric_ar_type",
        ),
        **_names(
            _OWN_LOSS,
            "cross_entropy_loss_fusion defer_embedding_wgrad_compute",
        ),
        **_names(
            _SCHEDULE_PLAN,
            "overlap_moe_expert_parallel_comm delay_wgrad_compute "
            "ep_overlap_early_attn_memory_release overlap_dispatch_backward_with_experts_wgrad",
        ),
        "use_ring_exchange_p2p": "it needs a torch built for it",
        "barrier_with_L1_time": _NO_TIMERS,
        **_names(
            _NO_VARIANT,
            "mtp_num_layers mtp_standalone apply_residual_connection_post_layernorm "
            "glu_linear_offset activation_func_clamp_value qk_l2_norm attention_output_gate "
            "no_rope_freq experimental_attention_variant linear_attention_freq use_mup mup_width_mult mup_output_mult "
            "use_fused_weighted_squared_relu is_hybrid_model heterogeneous_block_specs "
            "hetereogenous_dist_checkpoint moe_shared_expert_intermediate_size "
            "moe_shared_expert_overlap use_grouped_gemm_for_shared_expert moe_latent_size "
            "moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk "
            "moe_apply_probs_on_input",
        ),
        **_names(
            _OWN_ATTENTION,
            "softmax_type window_size window_attn_skip_freq qk_clip log_max_attention_logit "
            "apply_query_key_layer_scaling attention_softmax_in_fp32 masked_softmax_fusion "
            "fused_single_qkv_rope softmax_scale test_mode batch_invariant_mode",
        ),
        **_names(
            _SPEC,
            "persist_layer_norm memory_efficient_layer_norm fused_residual_rmsnorm "
            "use_transformer_engine_op_fuser use_te_activation_func "
            "use_grouped_gemm_for_dense_mlp",
        ),
        **_names(
            _REPEAT,
            "use_te_rng_tracker moe_router_force_load_balancing moe_router_force_biased moe_input_jitter_eps",
        ),
        "fp32_residual_connection": "the layers' norms and matrices expect one dtype, that of policy.precision",
        **_names(
            _NOT_IN_STACK,
            "use_kitchen use_kitchen_attention",
        ),
        **_names(
            _LOW_PRECISION_PARAMETERS,
            "fp8_param fp4_param",
        ),
        "moe_enable_routing_replay": "no sampler here reports which experts it chose",
        "moe_router_enable_expert_bias": _EXPORT,
        **_names(
            "the pinned stack has none of the flex dispatcher's back ends",
            "moe_enable_deepep moe_expert_rank_capacity_factor moe_paged_stash",
        ),
        "moe_token_dropping": "Megatron-Core does not read it; set moe_expert_capacity_factor",
        "moe_per_layer_logging": "the engine reports the load of every expert itself",
        **_names(
            _GRAPHS,
            "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_modules "
            "cuda_graph_scope inference_cuda_graph_scope delay_offload_until_cuda_graph "
            "moe_pad_experts_for_cuda_graph_inference",
        ),
        **_names(
            _INFERENCE,
            "flash_decode use_inference_optimized_layers inference_fuse_tp_communication "
            "inference_disable_triton_nvls_kernels",
        ),
    },
    "OptimizerConfig": {
        "reuse_grad_buf_for_mxfp8_param_ag": _LOW_PRECISION_PARAMETERS,
        "loss_scale": _FP16,
        "use_layer_wise_distributed_optimizer": _OTHER_OPTIMIZER,
        "overlap_param_gather_with_optimizer_step": _FRESH,
        "grad_norm_skip_threshold": "a step that Megatron-Core skips by itself would not be counted as skipped",
        "log_num_zeros_in_grad": "nothing reports it",
        "barrier_with_L1_time": _NO_TIMERS,
        "optimizer_cuda_graph": _GRAPHS,
    },
    "DistributedDataParallelConfig": {
        **_names(
            _FRESH,
            "overlap_param_gather align_param_gather",
        ),
        "num_distributed_optimizer_instances": _GROUPS,
        **_names(
            _LOW_PRECISION_PARAMETERS,
            "fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag",
        ),
        **_names(
            _FSDP,
            "use_megatron_fsdp use_custom_fsdp",
        ),
        "delay_wgrad_compute": _SCHEDULE_PLAN,
    },
    "OptimizerParamScheduler": {},
}

# Accepted and handed to Megatron-Core, where nothing reads them: why.
INERT: dict[str, dict[str, str]] = {
    "TransformerConfig": {
        **_names(
            _NO_USER_BUFFERS,
            "tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
            "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs "
            "tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 "
            "tp_comm_bootstrap_backend",
        ),
        **_names(
            _NO_VARIANT,
            "mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads "
            "mtp_hybrid_override_pattern linear_conv_kernel_dim linear_key_head_dim "
            "linear_value_head_dim linear_num_key_heads linear_num_value_heads "
            "mup_base_hidden_size mup_embedding_mult mup_base_head_dim "
            "mup_attn_scale_power mrope_section mamba_state_dim mamba_head_dim mamba_num_groups "
            "mamba_num_heads mamba_training_ssm_states_dtype use_mamba_mem_eff_path "
            "moe_shared_expert_gate moe_shared_expert_glu_interleave_size dsa_indexer_n_heads "
            "dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq "
            "dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss "
            "dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation "
            "dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32",
        ),
        **_names(
            _OWN_ATTENTION,
            "qk_clip_alpha qk_clip_threshold kitchen_attention_backend",
        ),
        **_names(
            _OWN_LOSS,
            "cross_entropy_fusion_impl wgrad_deferral_limit",
        ),
        "high_priority_a2a_comm_stream": _SCHEDULE_PLAN,
        **_names(
            _NO_FLEX,
            "moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep "
            "moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms "
            "moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_blocks_permute "
            "moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing "
            "moe_ncclep_static_shape moe_ncclep_zero_copy moe_paged_stash_page_size "
            "moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu",
        ),
        **_names(
            _NO_BIAS,
            "moe_router_bias_update_rate moe_router_quantile_balancing_ema",
        ),
        **_names(
            _GRAPHS,
            "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps",
        ),
        **_names(
            _INFERENCE,
            "inference_rng_tracker inference_sampling_seed nccl_all_reduce_for_prefill "
            "inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
            "inference_moe_token_dispatcher_type mlp_chunks_for_prefill",
        ),
    },
    "OptimizerConfig": {
        **_names(
            _OTHER_OPTIMIZER,
            "sgd_momentum muon_momentum muon_split_qkv muon_nesterov muon_scale_mode "
            "muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode "
            "muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2 "
            "soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo "
            "adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps",
        ),
        **_names(
            _FP16,
            "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        ),
    },
    "DistributedDataParallelConfig": {
        **_names(
            _NO_FSDP,
            "data_parallel_sharding_strategy suggested_communication_unit_size "
            "keep_fp8_transpose_cache fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail "
            "fsdp_all_gather_in_start_param_sync outer_dp_sharding_strategy "
            "fsdp_manual_registration gradient_reduce_div_fusion megatron_fsdp_main_params_dtype "
            "megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype "
            "megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
            "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer",
        ),
    },
    "OptimizerParamScheduler": {},
}

Need = Literal["te", "gpu"]


def _need(need: Need, names: str) -> dict[str, Need]:
    return dict.fromkeys(names.split(), need)


NEEDS: dict[str, dict[str, Need]] = {
    "TransformerConfig": {
        **_need(
            "te",
            "fp8 fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len "
            "fp8_amax_compute_algo fp8_wgrad fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention "
            "tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 "
            "fp4 fp4_recipe fp4_quantizer_factory disable_parameter_transpose_cache "
            "moe_router_padding_for_quantization moe_router_padding_for_fp8 "
            "attention_backend flash_attention_version cp_comm_type "
            "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
            "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers "
            "moe_grouped_gemm moe_permute_fusion moe_router_fusion gradient_accumulation_fusion",
        ),
        **_need(
            "gpu",
            "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
            "delta_offload_bytes_across_pp_ranks activation_offload_fraction "
            "fine_grained_offloading_max_inflight_offloads activation_func_fp8_input_store",
        ),
    },
    "OptimizerConfig": {
        **_need(
            "te",
            "use_precision_aware_optimizer main_grads_dtype exp_avg_dtype exp_avg_sq_dtype",
        ),
        **_need(
            "gpu",
            "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
            "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
        ),
    },
    "DistributedDataParallelConfig": _need("gpu", "nccl_ub disable_symmetric_registration"),
}

# NeMo-RL's name under megatron_cfg -> (why it means nothing here, what to do). Accepted where it is switched off.
OTHER_NAMES: dict[str, tuple[str, str]] = {
    "converter_type": ("the model's family follows from its config.json", "remove it"),
    "force_reconvert_from_hf": ("Hugging Face weights are read directly, nothing is converted beforehand", "remove it"),
    "env_vars": ("environment variables belong to the launcher's profile", "set them there"),
    "defer_fp32_logits": ("logits are never whole in float32: logprobs are computed in chunks", "remove it"),
    "use_fused_linear_logprobs": ("logprobs are always computed in chunks of the output layer's logits", "remove it"),
    "fused_linear_logprobs_chunk_size": ("logprobs are always computed in chunks of a fixed size", "remove it"),
    "use_gloo_process_groups": ("process groups are NCCL's on GPUs and gloo's on CPUs", "remove it"),
    "track_moe_metrics": ("the engine reports the load of every expert itself", "remove it"),
    "checkpoint": ("how checkpoints are written is set in one place", "see checkpointing"),
    "peft": ("LoRA is not supported", "remove it"),
    "fp8_cfg": (
        "Megatron-Core's own fields are set directly",
        "set policy.megatron_cfg.fp8 and policy.megatron_cfg.fp8_recipe",
    ),
    "train_iters": ("the length of the run is set in one place", "set grpo.max_num_steps"),
}
