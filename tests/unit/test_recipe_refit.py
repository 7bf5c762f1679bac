"""policy.generation.refit: what cannot work is refused with its reason."""

from __future__ import annotations

import pytest

from grpo_recipes.engine.refit import transport_of
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.checks import recipe_problems
from grpo_recipes.recipe.compose import resolve

VLLM = "policy.generation.backend=vllm"


def refit(transport):
    return f"policy.generation.refit.transport={transport}"


def problems(transport, *, nodes=1, backend="vllm"):
    recipe = resolve("tiny_arith", [f"policy.generation.backend={backend}"]).recipe
    generation = recipe.policy.generation
    section = generation.refit.model_copy(update={"transport": transport})
    policy = recipe.policy.model_copy(update={"generation": generation.model_copy(update={"refit": section})})
    cluster = recipe.cluster.model_copy(update={"num_nodes": nodes})
    recipe = recipe.model_copy(update={"policy": policy, "cluster": cluster})
    found = [p.message for p in recipe_problems(recipe) if p.where == "policy.generation.refit.transport"]
    return found, recipe


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "safetensors"])
def test_the_embedded_sampler_takes_no_transport(transport):
    with pytest.raises(UserError, match="nothing is transported"):
        resolve("tiny_arith", [refit(transport)])
    resolve("tiny_arith", [VLLM, refit(transport)])


def test_memory_and_folders_end_at_their_machine():
    [handles], [folder] = problems("ipc", nodes=2)[0], problems("safetensors", nodes=2)[0]
    assert "a handle names memory of one machine" in handles and "the folder is on a disk of one machine" in folder
    assert problems("broadcast", nodes=2)[0] == [] == problems("auto", nodes=2)[0] == problems("ipc")[0]


def test_auto_is_handles_on_one_machine_and_a_broadcast_on_several():
    assert transport_of(problems("auto")[1]) == "ipc"
    assert transport_of(problems("auto", nodes=2)[1]) == "broadcast"
    assert transport_of(problems("safetensors")[1]) == "safetensors"


def test_what_is_no_transport_is_refused():
    with pytest.raises(UserError, match=r"policy\.generation\.refit\.transport"):
        resolve("tiny_arith", [VLLM, refit("carrier_pigeon")])
    with pytest.raises(UserError, match="worker_extension_cls"):
        resolve("tiny_arith", [VLLM, "policy.generation.vllm_cfg.worker_extension_cls=a.B"])
