"""Rules that keep the house in order, checked on the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "grpo_recipes"

# A room may import itself and any room of a lower row; rooms of one row do not import each other, but contracts.
ROWS = [
    {"nemorun_plugin"},
    {"cli", "job"},
    {"launch", "proof"},
    {"engine"},
    {"policy", "generation", "environments", "data", "cluster"},
    {"runs"},
    {"recipe"},
    {"errors"},
]
ROW = {room: index for index, row in enumerate(ROWS) for room in row}


def room_of(module: str) -> str:
    """grpo_recipes.policy.contract -> policy; the package itself -> "" (it holds the version only)."""
    return [*module.split("."), ""][1]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of our own, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [
                f"{node.module}.{alias.name}" if node.module == "grpo_recipes" else str(node.module)
                for alias in node.names
            ]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "grpo_recipes")


def allowed(importer: str, imported: str) -> bool:
    """Both are module names; see ROWS."""
    here, there = room_of(importer), room_of(imported)
    if there in ("", "__version__") or here == there or ROW[there] > ROW[here]:
        return True
    return ROW[there] == ROW[here] and imported.split(".")[2:] == ["contract"]


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_every_room_has_a_row() -> None:
    rooms = {room_of(module_name(path)) for path in source_files()} - {""}
    assert rooms - ROW.keys() == set()


def test_imports_go_downwards_only() -> None:
    upwards = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in source_files()
        for line, imported in imports(path)
        if room_of(module_name(path)) and not allowed(module_name(path), imported)
    ]
    assert upwards == []


@pytest.mark.parametrize(
    ("importer", "imported", "verdict"),
    [
        ("grpo_recipes.cli", "grpo_recipes.launch.run", True),
        ("grpo_recipes.engine.step", "grpo_recipes.policy.contract", True),
        ("grpo_recipes.policy.megatron.policy", "grpo_recipes.engine.losses", False),
        ("grpo_recipes.policy.megatron.policy", "grpo_recipes.generation.contract", True),
        ("grpo_recipes.policy.megatron.policy", "grpo_recipes.generation.seeds", False),
        ("grpo_recipes.launch.run", "grpo_recipes.proof.verify", False),
        ("grpo_recipes.recipe.compose", "grpo_recipes.runs.folder", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, verdict: bool) -> None:
    assert allowed(importer, imported) is verdict


def forbidden_imports(room: str, packages: set[str]) -> list[str]:
    found = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in names if name.split(".")[0] in packages
            ]
    return found


def test_recipe_and_runs_never_import_torch_or_nemo_run() -> None:
    assert forbidden_imports("recipe", {"torch", "nemo_run", "transformers", "datasets", "megatron"}) == []
    assert forbidden_imports("runs", {"torch", "nemo_run"}) == []


def test_only_launch_knows_nemo_run() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"launch", "__pycache__"}
    assert [found for room in sorted(rooms) for found in forbidden_imports(room, {"nemo_run", "torchx"})] == []


def test_the_command_line_starts_without_heavy_imports() -> None:
    heavy = ["torch", "transformers", "datasets", "nemo_run", "megatron", "ray", "numpy", "matplotlib"]
    code = f"import sys, grpo_recipes.cli; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert out.stdout.strip() == "[]"


def tracked_files() -> list[Path]:
    out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in out.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_python_file_is_longer_than_600_lines() -> None:
    lengths = {path: len(path.read_bytes().splitlines()) for path in tracked_files() if path.suffix == ".py"}
    assert {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > 600} == {}


# Put together here, so that this file does not match itself.
FORBIDDEN = re.compile(
    "|".join(
        ["/wor" + "k/", "/roo" + "t/", "py" + r"pi\.org", "python" + "hosted", "npm" + r"js\.", "deb" + r"ian\.org"]
    )
)


def test_no_path_of_a_machine_and_no_registry_host_is_committed() -> None:
    found = []
    for path in tracked_files():
        raw = path.read_bytes()
        if b"\0" in raw[:8192]:
            continue
        for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), start=1):
            if FORBIDDEN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert found == []
