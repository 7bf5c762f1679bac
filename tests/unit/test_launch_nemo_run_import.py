from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_recipes.launch.nemo_run_import import _hidden

CODE = """
import importlib.util, sys
from grpo_recipes.launch.nemo_run_import import import_nemo_run
nemo_run = import_nemo_run()
print(nemo_run.__version__.partition("+")[0], nemo_run.LocalExecutor.__name__)  # "+" and a commit, in a checkout
print([name for name in sys.modules if name.split(".")[0] in ("torch", "leptonai")])
print([importlib.util.find_spec(name).has_location for name in ("torch", "leptonai")])
"""


def test_nemo_run_comes_without_torch_and_leptonai_which_can_be_imported_later() -> None:
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["0.11.1 LocalExecutor", "[]", "[True, True]"]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("some_absent", "some_empty", "some_empty/inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_what_is_hidden_is_hidden_only_inside(packages: None) -> None:
    with _hidden(absent="some_absent", empty="some_empty"):
        with pytest.raises(ImportError):
            importlib.import_module("some_absent")
        assert isinstance(importlib.import_module("some_empty.inner").Anything, type)
    assert importlib.import_module("some_absent").VALUE == 1
    assert importlib.import_module("some_empty.inner").VALUE == 1


def test_what_was_imported_before_stays(packages: None) -> None:
    absent, empty = importlib.import_module("some_absent"), importlib.import_module("some_empty")
    with _hidden(absent="some_absent", empty="some_empty"):
        assert importlib.import_module("some_absent") is absent
        assert importlib.import_module("some_empty") is empty
    assert importlib.import_module("some_absent") is absent
    assert importlib.import_module("some_empty") is empty


def test_upstream_still_imports_both() -> None:
    """If this fails, launch/nemo_run_import.py has nothing left to hide and can go."""
    upstream = importlib.metadata.distribution("nemo-run")
    sources = {"core/serialization/yaml.py": "import torch", "core/execution/lepton.py": "from leptonai."}
    for file, line in sources.items():
        assert line in Path(str(upstream.locate_file(f"nemo_run/{file}"))).read_text()
