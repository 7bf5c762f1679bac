from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.launch.profile import Profile, load_profile
from grpo_recipes.launch.run import environment


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "launchers").mkdir(parents=True)
    return tmp_path / "home"


def test_the_shipped_local_profile(home: Path) -> None:
    assert load_profile("local") == Profile(executor="local", description="this machine", env={})


def test_a_profile_is_frozen(home: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_profile("local").executor = "local"


def test_a_sites_own_profile_comes_first(home: Path) -> None:
    (home / "launchers" / "local.yaml").write_text("executor: local\nenv: {OMP_NUM_THREADS: 2}\n")
    assert load_profile("local").env == {"OMP_NUM_THREADS": "2"}


def test_a_profile_by_path(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("executor: local\ndescription: mine\n")
    assert load_profile(str(path)).description == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("executor: local\nenvs: {}\n", r"envs: Extra inputs.*\n.*did you mean env\?"),
        ("executor: locl\n", r"executor: Input should be 'local'"),
        ("description: no executor\n", r"executor: Field required"),
        ("executor: local\nenv: [1]\n", r"env: Input should be a valid dictionary"),
        ("- local\n", r"holds no mapping"),
        ("executor: [\n", r"not valid YAML"),
    ],
)
def test_a_bad_profile_is_one_clear_error(home: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_profile(str(path))
    assert str(path) in str(error.value)


def test_an_unknown_profile_names_the_nearest(home: Path) -> None:
    with pytest.raises(UserError, match=r"no executor profile is called 'locla'\n.*local"):
        load_profile("locla")
    with pytest.raises(UserError, match=r"missing\.yaml: no such profile"):
        load_profile("missing.yaml")


def test_the_jobs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/somewhere/bin")
    bin_folder = str(Path(sys.executable).parent)
    assert environment(Profile(executor="local", env={"A": "1"})) == {
        "PATH": f"{bin_folder}{os.pathsep}/somewhere/bin",
        "PYTHONWARNINGS": "ignore::SyntaxWarning",
        "A": "1",
    }
