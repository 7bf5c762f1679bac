"""Which part of a run a run is, and which groups its steps took, as its folder says."""

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.compose import resolve
from grpo_recipes.runs.arrivals import add_arrival, read_arrivals
from grpo_recipes.runs.folder import create_run
from grpo_recipes.runs.mode import WHOLE, Mode, read_mode, write_mode


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path / "run-a")


def test_a_folder_says_its_mode(run):
    assert read_mode(run) == WHOLE
    for mode in (Mode("rollout-only"), Mode("train-only", "runs/a")):
        write_mode(run, mode)
        assert read_mode(run) == mode
    assert Mode("train-only", "runs/a").options() == ["--train-only", "runs/a"]
    assert (WHOLE.options(), Mode("rollout-only").options()) == ([], ["--rollout-only"])
    run.mode_path.write_text('{"kind": "half", "source": null}')
    with pytest.raises(UserError, match=r"mode\.json: is not a mode of a run"):
        read_mode(run)


def test_parts_that_a_recipe_does_not_have_are_refused():
    with pytest.raises(UserError, match="--rollout-only: only GRPO has rollouts"):
        Mode("rollout-only").check(resolve("tiny_arith_warmstart").recipe)
    with pytest.raises(UserError, match="--replay: without asynchrony"):
        Mode("replay", ".").check(resolve("tiny_arith").recipe)
    with pytest.raises(UserError, match="no such run folder"):
        Mode("train-only", "nowhere").check(resolve("tiny_arith").recipe)


def test_options_that_exclude_one_another_are_named():
    from grpo_recipes.cli import _mode

    assert _mode(False, None, None, "runs/a") == WHOLE
    assert _mode(True, None, None, None) == Mode("rollout-only")
    with pytest.raises(UserError, match="--rollout-only and --resume exclude one another"):
        _mode(True, None, None, "runs/a")


def test_the_last_line_of_a_step_counts_and_a_torn_one_does_not(run):
    add_arrival(run, 1, 1, [1, 0], [2, 3])
    add_arrival(run, 1, 2, [3, 2], [4, 5])
    with run.arrivals_path.open("ab") as file:
        file.write(b'{"attempt": 1, "st')
    add_arrival(run, 2, 2, [2, 4], [3, 5])
    assert read_arrivals(run) == {1: (1, 0), 2: (2, 4)}
    run.arrivals_path.write_text("{}\n")
    with pytest.raises(UserError, match="is damaged"):
        read_arrivals(run)
