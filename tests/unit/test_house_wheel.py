"""What a wheel carries besides the code."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder holding the unpacked wheel."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    made = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (wheel,) = out.glob("grpo_recipes-*.whl")
    zipfile.ZipFile(wheel).extractall(out / "site")
    return out / "site"


def run(installed: Path, code: str, cwd: Path) -> list[str]:
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(installed)!r}); {code}"]
    out = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, env={})
    return out.stdout.splitlines()


def test_recipes_launchers_and_measured_results_are_found_in_a_wheel(installed: Path, tmp_path: Path) -> None:
    code = "from grpo_recipes.recipe import locate as l; print(l.recipes_folder(), l.launchers_folder(), l.measured_folder())"
    package = installed / "grpo_recipes"
    assert run(installed, code, tmp_path) == [f"{package}/_recipes {package}/_launchers {package}/_measured"]


def test_a_recipe_resolves_to_the_same_digest_as_in_the_checkout(installed: Path, tmp_path: Path) -> None:
    from grpo_recipes.recipe.compose import resolve

    code = "from grpo_recipes.recipe.compose import resolve; print(resolve('tiny_arith').digest)"
    assert run(installed, code, tmp_path) == [resolve("tiny_arith").digest]


def test_the_commands_are_declared(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info")
    assert (metadata / "entry_points.txt").read_text().splitlines() == [
        "[console_scripts]",
        "nemo-run = grpo_recipes.cli:main",
        "",
        "[nemo_run.cli]",
        "recipe = grpo_recipes.nemorun_plugin",
    ]
