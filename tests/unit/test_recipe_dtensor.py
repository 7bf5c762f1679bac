"""policy.dtensor_cfg: what is refused before any process starts, and with which words."""

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.compose import resolve
from grpo_recipes.recipe.dtensor import model_problems
from grpo_recipes.recipe.model_flops import model_shape
from grpo_recipes.recipe.model_folder import check_model
from grpo_recipes.recipe.schema import DTensorConfig
from grpo_recipes.recipe.shrink import FAMILIES

CFG = "policy.dtensor_cfg"
ON = ("policy.megatron_cfg.enabled=false", f"{CFG}.enabled=true")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{CFG}.enabled=true",), "are both true"),
        (("policy.megatron_cfg.enabled=false",), "are both false"),
        ((*ON, f"{CFG}.pipeline_parallel_size=2"), "layers are not split into pipeline stages"),
        ((*ON, f"{CFG}.pipeline_model_parallel_size=2"), "layers are not split into pipeline stages"),
        ((*ON, f"{CFG}.expert_model_parallel_size=2"), "experts are not spread"),
        ((*ON, f"{CFG}.tensor_model_parallel_size=2"), f"did you mean {CFG}.tensor_parallel_size"),
        ((*ON, f"{CFG}.cpu_ofload=true"), f"did you mean {CFG}.cpu_offload"),
        ((*ON, f"{CFG}.optimizer.lr=1.0e-3"), "set policy.megatron_cfg.optimizer"),
        ((*ON, f"{CFG}.sequence_parallel=true"), "tensor_parallel_size is 1"),
        ((*ON, f"{CFG}.tensor_parallel_size=2"), "need groups of 2 processes"),
        (
            (*ON, f"{CFG}.torch_compile=true", f"{CFG}.tensor_parallel_size=2", "cluster.cpu_processes=2"),
            "to agree with",
        ),
        ((*ON, "policy.megatron_cfg.optimizer.decoupled_lr=1.0e-3"), "is Megatron-Core's alone"),
        ((*ON, "policy.megatron_cfg.optimizer.lr=0"), "the learning rate must be greater than 0"),
    ],
)
def test_refused(overrides, words):
    with pytest.raises(UserError) as error:
        resolve("tiny_arith", overrides)
    assert words in str(error.value)


def test_a_section_that_is_not_enabled_says_nothing_of_the_layout():
    resolved = resolve("tiny_arith", (*ON, "policy.megatron_cfg.pipeline_model_parallel_size=3"))
    assert resolved.recipe.policy.dtensor_cfg.enabled


def test_experts_are_neither_cut_nor_compiled():
    shape = model_shape(FAMILIES["qwen3_moe"])
    cfg = DTensorConfig(enabled=True, tensor_parallel_size=2, torch_compile=True)
    assert [problem.where for problem in model_problems(cfg, shape)] == [
        f"{CFG}.torch_compile",
        f"{CFG}.tensor_parallel_size",
    ]


@pytest.mark.parametrize(("size", "words"), [(3, "attention heads"), (8, "attention heads")])
def test_sizes_that_do_not_divide_the_model(size, words):
    overrides = (*ON, f"{CFG}.tensor_parallel_size={size}", f"cluster.cpu_processes={size}")
    policy = resolve("tiny_arith", overrides).recipe.policy
    with pytest.raises(UserError, match=words):
        check_model(policy)
