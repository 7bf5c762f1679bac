"""Every recipe in recipes/ composes, is valid, is documented, and a released version never changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_recipes.recipe.catalogue import RecipeFile, catalogue
from grpo_recipes.recipe.compose import resolve
from grpo_recipes.recipe.digest import canonical, digest
from grpo_recipes.recipe.listing import evidence
from grpo_recipes.recipe.locate import recipes_folder

FILES = [file for files in catalogue().values() for file in files]
IDS = [f"{file.name}@{file.version}" for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_it_composes_and_is_valid(file: RecipeFile) -> None:
    resolved = resolve(f"{file.name}@{file.version}")
    assert (resolved.name, resolved.version, resolved.root) == (file.name, file.version, file.path.parent)
    assert resolved.recipe.description


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_its_digest_is_the_recorded_one(file: RecipeFile) -> None:
    """A new optional field of the schema changes no digest; an edit of the recipe or of its bases does."""
    recorded = json.loads((file.path.parent / "digests.json").read_text())
    assert recorded.keys() == {other.version for other in catalogue()[file.name]}
    assert resolve(f"{file.name}@{file.version}").digest == recorded[file.version]


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_it_names_a_stack_that_exists(file: RecipeFile) -> None:
    stacks = yaml.safe_load((recipes_folder().parent / "containers" / "stack.yaml").read_text())["stacks"]
    assert resolve(f"{file.name}@{file.version}").recipe.stack in stacks


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_its_readme_shows_commands_that_are_valid(file: RecipeFile) -> None:
    """Covers: published commands that do not work."""
    text = (file.path.parent / "README.md").read_text()
    commands = [line.partition("#")[0].split() for line in text.splitlines() if line.startswith("nemo-run ")]
    assert ["nemo-run", "recipe", file.name] in [command[:3] for command in commands]
    for _, command, *arguments in commands:
        if command in ("recipe", "show"):
            resolve(arguments[0], arguments[1:])


def test_the_digest_is_of_what_was_set() -> None:
    assert canonical({"b": 1.0, "a": {"y": [2, 0.5], "x": None}}) == (
        '{"schema":1,"values":{"a":{"x":null,"y":[2,0.5]},"b":1}}'
    )
    assert digest({"a": 1}) == "33dd99710f15f0a8c8488252d203cd66e01a6d66aebe96dc2d38453080f82a20"
    assert digest({"a": 1.0}) == digest({"a": 1})
    assert digest({"a": True}) != digest({"a": 1})
    assert digest({"a": 1, "logger": {"wandb": True}}) == digest({"a": 1})
    assert digest({"grpo": {"seed": 1, "x": 2}}, without=("grpo.seed",)) == digest({"grpo": {"x": 2}})


def test_spelling_and_defaults_change_no_digest() -> None:
    plain = resolve("tiny_arith@v1")
    assert resolve("tiny_arith@v1", ["policy.max_grad_norm=1"]).digest == plain.digest
    assert resolve("tiny_arith@v1", ["logger.tensorboard=true"]).digest == plain.digest
    assert resolve("tiny_arith@v1", ["grpo.seed=43"]).digest != plain.digest
    assert (
        resolve("tiny_arith@v1", ["loss_fn.reference_policy_kl_type=k3"]).digest != plain.digest
    )  # now it is explicit


def test_the_command_that_records_digests() -> None:
    command = [sys.executable, "-m", "grpo_recipes.recipe.digest", "tiny_arith"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == {
        file.version: resolve(f"tiny_arith@{file.version}").digest for file in catalogue()["tiny_arith"]
    }


def test_evidence_is_what_lies_in_the_results(tmp_path: Path) -> None:
    assert evidence("tiny_arith", None) == "none"
    assert evidence("tiny_arith", tmp_path) == "none"
    for run in ("cpu-2-cores/seed0", "cpu-2-cores/seed1", "h200/seed0"):
        (tmp_path / "tiny_arith" / run).mkdir(parents=True)
        (tmp_path / "tiny_arith" / run / "manifest.json").write_text("{}")
    (tmp_path / "tiny_arith" / "h200" / "unfinished").mkdir()
    (tmp_path / "tiny_arith" / "reference.json").write_text("{}")
    assert evidence("tiny_arith", tmp_path) == "2 runs on cpu-2-cores, 1 run on h200, reference band"
