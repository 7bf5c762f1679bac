import pytest

from grpo_recipes.errors import UserError
from policy_models import make_policy, write_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def test_what_the_recipe_sets_reaches_megatron(folder):
    cfg = {
        "optimizer": {"lr": 3e-4, "adam_beta2": 0.95},
        "distributed_data_parallel_config": {"check_for_large_grads": True},
        "activation_checkpointing": False,
        "recompute_granularity": "selective",
    }
    policy = make_policy("megatron", folder, cfg)
    assert policy.optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert policy.model[0].ddp_config.check_for_large_grads
    assert policy.built.config.recompute_granularity == "selective"


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"context_parallel_size": 2}, "does not divide 1 process"),
        ({"tensor_model_parallel_size": 2}, "does not divide 1 process"),
        ({"optimizer": {"lr": 1e-3, "use_distributed_optimizer": False}}, "use_distributed_optimizer"),
        ({"recompute_granularity": "nonsense"}, "policy.megatron_cfg"),
    ],
)
def test_settings_that_cannot_work(cfg, message, folder):
    with pytest.raises(UserError, match=message):
        make_policy("megatron", folder, {"optimizer": {"lr": 1e-3}} | cfg)
