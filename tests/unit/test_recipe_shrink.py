"""A shrunken configuration keeps what makes the architecture."""

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.architecture import number_of_experts
from grpo_recipes.recipe.shrink import FAMILIES, shrink

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN25_1B5 = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}


def test_llama_70b() -> None:
    tiny = shrink(LLAMA_70B)
    assert tiny["num_hidden_layers"] == 4
    assert tiny["num_attention_heads"] == 8 * tiny["num_key_value_heads"] == 16
    assert tiny["head_dim"] * tiny["num_attention_heads"] == tiny["hidden_size"] == 128
    assert tiny["intermediate_size"] == 192
    assert tiny["vocab_size"] == 131
    assert tiny["rope_scaling"] == {**LLAMA_70B["rope_scaling"], "original_max_position_embeddings": 256}
    assert tiny["max_position_embeddings"] == 2048
    assert (tiny["rope_theta"], tiny["rms_norm_eps"], tiny["tie_word_embeddings"]) == (500000.0, 1e-05, False)
    assert "torch_dtype" not in tiny
    assert LLAMA_70B["num_hidden_layers"] == 80, "the original is left alone"


def test_a_scaling_has_wavelengths_on_both_sides_of_its_borders() -> None:
    import math

    tiny = shrink(LLAMA_70B)
    scaling = tiny["rope_scaling"]
    length = scaling["original_max_position_embeddings"]
    waves = [2 * math.pi * 500000.0 ** (i / tiny["head_dim"]) for i in range(0, tiny["head_dim"], 2)]
    kept = [w for w in waves if w < length / scaling["high_freq_factor"]]
    scaled = [w for w in waves if w > length / scaling["low_freq_factor"]]
    assert kept and scaled and len(kept) + len(scaled) < len(waves)


def test_qwen25_keeps_its_two_key_value_heads_and_tied_embeddings() -> None:
    tiny = shrink(QWEN25_1B5)
    assert (tiny["num_attention_heads"], tiny["num_key_value_heads"]) == (12, 2)
    assert tiny["tie_word_embeddings"] is True
    assert tiny["max_window_layers"] == 4


def test_qwen3_moe_keeps_wide_heads_and_routed_experts() -> None:
    tiny = shrink(QWEN3_30B_A3B, layers=8)
    assert tiny["num_hidden_layers"] == 8
    assert tiny["head_dim"] * tiny["num_attention_heads"] != tiny["hidden_size"]
    assert (tiny["num_experts"], tiny["num_experts_per_tok"], tiny["norm_topk_prob"]) == (8, 2, True)
    assert len({tiny["hidden_size"], tiny["intermediate_size"], tiny["moe_intermediate_size"]}) == 3
    assert number_of_experts(tiny) == 8


def test_layers_that_differ_are_kept_where_they_fit() -> None:
    tiny = shrink({**QWEN3_30B_A3B, "mlp_only_layers": [1, 30], "layer_types": ["full_attention"] * 48})
    assert tiny["mlp_only_layers"] == [1]
    assert tiny["layer_types"] == ["full_attention"] * 4
    assert shrink({**QWEN3_30B_A3B, "mlp_only_layers": [30]})["mlp_only_layers"] == [0]


def test_sizes_can_be_chosen() -> None:
    tiny = shrink(LLAMA_70B, layers=2, vocab_size=512, head_dim=64)
    assert (tiny["num_hidden_layers"], tiny["vocab_size"], tiny["head_dim"]) == (2, 512, 64)
    assert tiny["hidden_size"] == 64 * tiny["num_attention_heads"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_shrinks_to_a_model_that_two_ranks_can_share(family: str) -> None:
    tiny = shrink(FAMILIES[family])
    assert tiny["model_type"] == family
    assert tiny["num_key_value_heads"] % 2 == 0
    assert tiny["vocab_size"] % 2 == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 7}, "64 query heads are not a multiple of 7"),
    ],
)
def test_a_configuration_that_is_no_model_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shrink({**LLAMA_70B, **change})
