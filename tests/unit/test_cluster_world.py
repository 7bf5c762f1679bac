import pytest

from grpo_recipes.cluster.world import World, world_of
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import ClusterConfig


@pytest.mark.parametrize(
    ("asked", "gpus", "world"),
    [
        ({}, 0, World(1, "cpu")),
        ({}, 8, World(1, "cuda")),
        ({"cpu_processes": 1}, 0, World(1, "cpu")),
        ({"cpu_processes": 4}, 0, World(4, "cpu")),
        ({"cpu_processes": 4}, 8, World(4, "cpu")),
        ({"gpus_per_node": 1}, 8, World(1, "cuda")),
        ({"gpus_per_node": 8}, 8, World(8, "cuda")),
    ],
)
def test_processes_and_devices(asked, gpus, world):
    assert world_of(ClusterConfig(**asked), gpus) == world


@pytest.mark.parametrize(("gpus", "has"), [(0, "this machine has none"), (4, "this machine has 4")])
def test_too_few_gpus(gpus, has):
    with pytest.raises(UserError, match=rf"^cluster\.gpus_per_node: asks for 8 GPUs, and {has}") as caught:
        world_of(ClusterConfig(gpus_per_node=8), gpus)
    assert ("cluster.cpu_processes" in caught.value.mend) == (gpus == 0)
