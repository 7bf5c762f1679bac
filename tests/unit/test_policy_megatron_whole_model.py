"""The configuration of the copy that is sampled from: nothing of the trainer's split or of its 8-bit products."""

from typing import Any

import pytest

from grpo_recipes.policy.hf.families import family_of
from grpo_recipes.policy.hf.folder import read_config
from grpo_recipes.policy.megatron import trainer  # noqa: F401  before the others: it makes Megatron-Core run on a CPU
from grpo_recipes.policy.megatron.config import transformer_config
from grpo_recipes.policy.megatron.whole_model import for_sampling, needs_copy
from policy_models import policy_config, write_model

VIRTUAL = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "data parallelism alone": (False, {}),
    "recomputed": (False, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}),
    "tp": (True, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "activation_checkpointing": True}),
    "uneven": (True, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}),
    "layout": (True, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tttL"}),
    "virtual": (True, {**VIRTUAL, "overlap_p2p_comm_warmup_flush": True}),
    "cp": (True, {"context_parallel_size": 2, "cp_comm_type": "all_gather"}),
    "fp8": (True, {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}),
    "mxfp8": (True, {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_output_proj": True}),
    "fp4": (True, {"fp4": "e2m1"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_model("llama", folder, num_hidden_layers=4)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_megatron_takes_what_is_left_of_the_settings(name, folder, monkeypatch):
    """Covers: the second refit corrupts weights (8-bit copies of weights that a sampler would go on with)."""
    monkeypatch.setattr("grpo_recipes.policy.megatron.config._check_hardware", lambda policy: None)
    copied, settings = CASES[name]
    policy = policy_config(folder, precision="bfloat16", megatron_cfg={"optimizer": {"lr": 1e-3}, **settings})
    assert needs_copy(policy.megatron_cfg) is copied
    hf = read_config(folder, trust_remote_code=False)
    unsplit = policy.model_copy(update={"megatron_cfg": for_sampling(policy.megatron_cfg)})
    config = transformer_config(hf, family_of(hf), unsplit)
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (1, 1)
    assert (config.context_parallel_size, config.virtual_pipeline_model_parallel_size) == (1, None)
    assert (config.fp8, config.fp4, config.num_layers) == (None, None, 4)
    assert not needs_copy(unsplit.megatron_cfg)
