"""How a launched job ended, in words and as an exit status."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from grpo_recipes.launch.run import _conclude
from grpo_recipes.recipe.compose import resolve
from grpo_recipes.runs.folder import create_run


@pytest.mark.parametrize(
    ("code", "asked", "status"),
    [
        (0, True, 0),  # it was done before it heard
        (130, False, 130),
        (143, True, 130),  # ended by SIGTERM before it could handle signals
        (137, True, 130),  # killed by the second Ctrl-C
        (137, False, 137),
        (2, True, 2),  # the checkpoint could not be written
    ],
)
def test_exit_status(code, asked, status, tmp_path, capsys):
    folder = create_run(tmp_path / "a run; $(x)")
    folder.recipe_path.write_text(resolve("tiny_arith", ()).to_yaml())
    folder.log_path.write_text("error: could not write the checkpoint\n")
    (folder.path / "job.exit").write_text(f"{code}\n")
    assert _conclude(folder, SimpleNamespace(asked=asked), None, 1.0, Console(soft_wrap=True)) == status
    said = capsys.readouterr()
    assert ("interrupted" in said.out) == (status == 130)
    assert ("could not write the checkpoint" in said.err) == (status in (2, 137))
    if status == 130:  # a line that a shell takes as it is
        assert f"nemo-run recipe tiny_arith@v1 --resume '{folder.path}'" in said.out
