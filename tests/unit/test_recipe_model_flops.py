import pytest

from grpo_recipes.recipe.model_flops import ModelShape, matmul_parameters, model_shape, sequence_cost

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}


def test_matmul_parameters_are_the_published_sizes_without_embedding_and_norms():
    """Llama 3.1 8B has 8,030,261,248 parameters, of which 128,256 x 4,096 in the embedding and 65 norms of 4,096."""
    assert matmul_parameters(model_shape(LLAMA_8B)) == 8_030_261_248 - 128_256 * 4096 - 65 * 4096


def test_only_active_experts_count():
    """Qwen3-30B-A3B: 3.35 B active parameters, of which 0.31 B in the embedding."""
    per_layer = 2048 * 128 * (64 + 8) + 8 * 3 * 2048 * 768 + 2048 * 128
    assert matmul_parameters(model_shape(QWEN3_30B_A3B)) == 48 * per_layer + 2048 * 151936
    assert matmul_parameters(model_shape(QWEN3_30B_A3B)) == pytest.approx(3.35e9 - 0.31e9, rel=0.01)


def test_layers_without_experts_are_dense():
    mixed = model_shape(QWEN3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert mixed.expert_layers == 23
    dense, expert = 3 * 2048 * 6144, 8 * 3 * 2048 * 768 + 2048 * 128
    assert matmul_parameters(mixed) == 48 * 2048 * 128 * 72 + 25 * dense + 23 * expert + 2048 * 151936


def test_mixtral_names_its_experts_differently():
    config = LLAMA_8B | {"num_local_experts": 8, "num_experts_per_tok": 2}
    shape = model_shape(config)
    assert (shape.experts, shape.expert_ffn, shape.expert_layers) == (8, 14336, 32)


def test_cost_counts_every_multiplication():
    """Reference: the FLOPs of each product of matrices of one layer, one by one, with the causal half as n^2 / 2."""
    shape = ModelShape(hidden=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10)
    n = 6
    q, k_and_v, output = 2 * n * 8 * 8, 2 * (2 * n * 8 * 4), 2 * n * 8 * 8
    scores_and_mix = 2 * (2 * 2 * 4 * n * n // 2)
    mlp, logits = 3 * (2 * n * 8 * 16), 2 * n * 8 * 10
    assert sequence_cost(n, shape) == 3 * (q + k_and_v + output + scores_and_mix + mlp + logits)


def test_attention_is_quadratic():
    shape = model_shape(LLAMA_8B)
    assert sequence_cost(8192, shape) / sequence_cost(4096, shape) == pytest.approx(2.13, abs=0.01)
