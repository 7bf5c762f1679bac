"""A checkpoint exported without the trainer is, byte for byte, what the trainer itself exports."""

import os
import resource
import signal

import pytest

from grpo_recipes.engine.checkpoint import CheckpointStore
from grpo_recipes.engine.export import export_checkpoint, find_checkpoint
from grpo_recipes.engine.setup import trainer_class
from grpo_recipes.errors import UserError
from grpo_recipes.policy.contract import empty_batch
from grpo_recipes.recipe.compose import resolve
from grpo_recipes.runs.folder import create_run
from policy_models import policy_gradient_loss, random_batch, write_model

DTENSOR = ["policy.megatron_cfg.enabled=false", "policy.dtensor_cfg.enabled=true"]


def make_run(path, model, *overrides, family="llama", **config):
    """A run folder with checkpoints of steps 1 and 2, and the trainer as it is after step 2."""
    write_model(family, model, **config)
    resolved = resolve("tiny_arith", [f"policy.model_name={model}", "policy.max_total_sequence_length=64", *overrides])
    run = create_run(path)
    run.recipe_path.write_text(resolved.to_yaml())
    policy = trainer_class(resolved.recipe.policy)(resolved.recipe.policy, 1.0, 9, model)
    store = CheckpointStore(run.checkpoints_dir, keep_last=2, keep_top_k=0, higher_is_better=True)
    for step in (1, 2):
        policy.train([random_batch(6, seed=step), empty_batch()], policy_gradient_loss)
        store.save(step, {}, None, policy.save)
    return policy


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("family", "overrides", "config"),
    [
        ("llama", ["policy.precision=float32"], {"tie_word_embeddings": True}),
        ("llama", ["policy.precision=bfloat16", "policy.initial_weights=random"], {"tie_word_embeddings": False}),
        ("qwen2", ["policy.precision=bfloat16"], {"max_shard_size": "20KB"}),
        ("qwen3_moe", ["policy.precision=bfloat16"], {}),
        ("llama", [*DTENSOR, "policy.precision=float32"], {"tie_word_embeddings": True}),
        ("mixtral", [*DTENSOR, "policy.precision=bfloat16"], {}),
    ],
    ids=["llama, tied", "llama, random", "qwen2", "experts", "llama, DTensor", "experts, DTensor"],
)
def test_equals_the_trainers_own_export_byte_for_byte(family, overrides, config, tmp_path):
    policy = make_run(tmp_path / "run", tmp_path / "model", *overrides, family=family, **config)
    (tmp_path / "own").mkdir()
    policy.export(tmp_path / "own")
    assert export_checkpoint(tmp_path / "run", tmp_path / "found").name == "step_000002"
    own = files(tmp_path / "own")
    assert files(tmp_path / "found") == own and "config.json" in own
    named = tmp_path / "run" / "checkpoints" / "step_000001"
    assert export_checkpoint(tmp_path / "run", tmp_path / "by step", 1) == named
    assert export_checkpoint(named, tmp_path / "by name") == named
    assert files(tmp_path / "by step") == files(tmp_path / "by name") != own


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    make_run(path / "run", path / "model")
    return path / "run"


@pytest.fixture
def target(tmp_path):
    yield tmp_path / "out"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_target_in_use_is_refused(run, target):
    target.mkdir()
    export_checkpoint(run, target)
    before = files(target)
    with pytest.raises(UserError, match="not an empty folder"):
        export_checkpoint(run, target)
    assert files(target) == before


def test_a_checkpoint_from_before_the_first_step_is_named(tmp_path):
    for step in (0, 10):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    with pytest.raises(UserError, match="there are: 0, 10"):
        find_checkpoint(tmp_path, 7)


def test_what_is_no_checkpoint_is_refused(run, target):
    with pytest.raises(UserError, match=r"no checkpoint of step 7\n.*there are: 1, 2"):
        export_checkpoint(run, target, 7)
    with pytest.raises(UserError, match="nowhere: no such run"):
        export_checkpoint(target / "nowhere", target)
    with pytest.raises(UserError, match="holds no checkpoint"):
        export_checkpoint(target.parent, target)
    with pytest.raises(UserError, match="not the checkpoint of step 2"):
        export_checkpoint(run / "checkpoints" / "step_000001", target, 2)


def test_a_full_disk_leaves_nothing(run, target):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError, match="could not be written"):
            export_checkpoint(run, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not target.exists()


def test_a_damaged_or_homeless_checkpoint_is_refused(run, target, tmp_path_factory):
    import shutil

    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(run, copy)
    (copy / "recipe.yaml").unlink()
    with pytest.raises(UserError, match="lies in no run folder"):
        export_checkpoint(copy, target)
    shard = copy / "checkpoints" / "step_000002" / "policy" / "rank-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 8)
    with pytest.raises(UserError, match=r"rank-00000\.safetensors has changed"):
        export_checkpoint(copy, target)
