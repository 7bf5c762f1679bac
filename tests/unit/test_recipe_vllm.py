"""policy.generation.vllm_cfg: every key is an engine argument of the pinned vLLM, or an error that says what is meant."""

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.compose import resolve

VLLM = "policy.generation.backend=vllm"
CFG = "policy.generation.vllm_cfg"


def problem(*overrides):
    with pytest.raises(UserError) as caught:
        resolve("tiny_arith", [VLLM, *overrides])
    return str(caught.value)


def test_the_backend_and_its_arguments_reach_the_recipe():
    generation = resolve(
        "tiny_arith", [VLLM, f"{CFG}.enforce_eager=false", f"{CFG}.block_size=32"]
    ).recipe.policy.generation
    assert generation.backend == "vllm"
    assert generation.vllm_cfg == {"enforce_eager": False, "block_size": 32}


def test_mappings_and_nulls_are_taken_where_vllm_takes_them():
    values = [f"{CFG}.compilation_config={{cudagraph_mode: NONE}}", f"{CFG}.max_num_batched_tokens=null"]
    assert resolve("tiny_arith", [VLLM, *values]).recipe.policy.generation.vllm_cfg == {
        "compilation_config": {"cudagraph_mode": "NONE"},
        "max_num_batched_tokens": None,
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"{CFG}.gpu_memory_utilisation=0.5", f"did you mean {CFG}.gpu_memory_utilization"),
        (f"{CFG}.enforce_eager=1", "should be bool, is 1"),
        (f"{CFG}.kv_cache_dtype=fp9", "should be one of"),
        (f"{CFG}.dtype=float16", "it is policy.precision"),
        (f"{CFG}.logprobs_mode=raw_logprobs", "cannot be set"),
        (f"{CFG}.max_model_len=8", "cannot hold a sequence of max_total_sequence_length"),
        ("policy.generation.temperature=0.001", "vLLM draws at 0.01 whatever is lower"),
        ("policy.generation.top_p=0.9", "unknown key"),
        ("policy.generation.backend=vlm", "did you mean vllm?"),
    ],
)
def test_what_vllm_or_the_trainer_would_not_do_is_refused(override, said):
    assert said in problem(override)


def test_a_key_is_checked_also_where_the_backend_is_another():
    with pytest.raises(UserError, match="is not an engine argument of vLLM"):
        resolve("tiny_arith", [f"{CFG}.nonsense=1"])
