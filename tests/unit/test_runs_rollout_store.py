from dataclasses import fields, replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_recipes.errors import UserError
from grpo_recipes.runs.folder import create_run
from grpo_recipes.runs.rollout_store import (
    ARRAYS,
    StoredRollouts,
    keep_last,
    read_stored,
    stored_steps,
    write_stored,
)


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path / "run-a")


STORED = StoredRollouts(
    step=5,
    weight_version=9,
    recipe_digest="abc",
    prompt_ids=np.array([1, 2, 3, 1, 2, 3], np.int32),
    prompt_lengths=np.array([3, 3], np.int32),
    response_ids=np.array([7, 8, 9], np.int32),
    response_lengths=np.array([1, 2], np.int32),
    logprobs=np.array([-0.1, -0.2, -float("inf")], np.float32),
    weight_versions=np.array([8, 8, 9], np.int32),
    example=np.array([41, 41], np.int32),
    group=np.array([2**40, 2**40], np.int64),
    sample=np.array([0, 1], np.int32),
    seed=np.array([2**63 - 1, 5], np.int64),
    reward=np.array([0.1, 0.0], np.float64),
    valid=np.array([True, False]),
    finish_reason=np.array([0, 1], np.uint8),
)


def test_what_is_read_is_what_was_written_bit_for_bit(run):
    write_stored(run, 5, STORED)
    assert [path.name for path in run.rollouts_dir.iterdir()] == ["step_000005.safetensors"]
    found = read_stored(run, 5)
    assert (found.step, found.weight_version, found.recipe_digest) == (5, 9, "abc")
    for name in ARRAYS:
        ours, theirs = getattr(STORED, name), getattr(found, name)
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes(), name
    assert {f.name for f in fields(StoredRollouts)} - set(ARRAYS) == {"step", "weight_version", "recipe_digest"}


def test_only_the_last_steps_are_kept(run):
    for step in (2, 9, 10):
        write_stored(run, step, replace(STORED, step=step))
    keep_last(run, 2)
    assert stored_steps(run) == [9, 10]
    with pytest.raises(UserError, match="no stored rollouts of step 2") as caught:
        read_stored(run, 2)
    assert "9, 10" in caught.value.mend
    keep_last(run, 0)
    assert stored_steps(run) == []


def test_a_damaged_file_is_named(run):
    write_stored(run, 5, STORED)
    path = run.rollouts_dir / "step_000005.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(UserError, match=r"step_000005\.safetensors: cannot be read"):
        read_stored(run, 5)
    path.write_bytes(whole)
    save_file(
        load_file(path) | {"logprobs": np.zeros(2, np.float32)},
        path,
        {"step": "5", "weight_version": "9", "recipe_digest": ""},
    )
    with pytest.raises(UserError, match="logprobs has 2 entries, expected 3"):
        read_stored(run, 5)
