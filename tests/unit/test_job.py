import os
import signal

from grpo_recipes import job
from grpo_recipes.errors import UserError
from grpo_recipes.runs.folder import create_run


def test_an_unreadable_run_folder_is_one_clear_error(tmp_path, capsys):
    folder = create_run(tmp_path / "run")
    folder.recipe_path.write_text("")
    folder.manifest_path.write_text("{")
    assert job.main(folder.path) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder.manifest_path}: cannot be read")


def test_signals_are_heard_from_the_start(tmp_path, monkeypatch):
    """A Ctrl-C while libraries are imported must not end in a traceback."""
    folder = create_run(tmp_path / "run")
    folder.recipe_path.write_text("")

    def interrupted(_):
        os.kill(os.getpid(), signal.SIGINT)
        raise UserError("the end of this test")

    monkeypatch.setattr(job, "next_attempt", interrupted)
    assert job.main(folder.path) == 2
