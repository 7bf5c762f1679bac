import hashlib
import subprocess

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.runs.files import folder_sha256, rows_sha256, text_sha256
from grpo_recipes.runs.folder import create_run
from grpo_recipes.runs.manifest import (
    add_attempt,
    build_manifest,
    git_state,
    package_versions,
    read_manifest,
    write_manifest,
)


def make() -> dict:
    return build_manifest(
        name="tiny_arith",
        version="v1",
        digest="abc",
        explicit={"grpo": {"seed": 1}},
        full={"grpo": {"seed": 1, "val_period": 10}},
        overrides=["grpo.seed=1"],
        command=["nemo-run", "recipe", "tiny_arith"],
        seeds={"run": 1},
        inputs={"chat_template": "def"},
        backends={"attention": "sdpa"},
        gpus=["H200"],
    )


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_manifest_says_what_the_run_was_and_comes_back(tmp_path):
    manifest = make()
    run = create_run(tmp_path / "run")
    write_manifest(run, manifest)
    assert read_manifest(run) == manifest
    assert manifest["recipe"]["overrides"] == ["grpo.seed=1"]
    assert manifest["hardware"]["gpus"] == ["H200"]
    assert manifest["hardware"]["cores"] >= 1
    assert manifest["hardware"]["memory_bytes"] > 2**28
    assert manifest["hardware"]["cpu"]
    assert len(manifest["code"]["sources_sha256"]) == 64
    assert "pydantic" in manifest["software"]["packages"]
    assert [(a["attempt"], a["resumed_from"]) for a in manifest["attempts"]] == [(1, 0)]


def test_a_resume_adds_an_attempt_and_changes_nothing_else():
    manifest = make()
    resumed = add_attempt(manifest, 2, 40)
    assert [(a["attempt"], a["resumed_from"]) for a in resumed["attempts"]] == [(1, 0), (2, 40)]
    assert {k: v for k, v in resumed.items() if k != "attempts"} == {
        k: v for k, v in manifest.items() if k != "attempts"
    }
    assert len(manifest["attempts"]) == 1


def test_missing_or_damaged_manifest_is_a_user_error(tmp_path):
    run = create_run(tmp_path / "run")
    with pytest.raises(UserError, match="no such file"):
        read_manifest(run)
    for text in ('{"recipe": ', "[1]"):
        run.manifest_path.write_text(text)
        with pytest.raises(UserError):
            read_manifest(run)


def test_only_installed_packages_are_listed():
    assert package_versions(["pytest", "no-such-package"]) == {"pytest": pytest.__version__}


def test_git_state_sees_commit_and_every_kind_of_change(tmp_path):
    package = tmp_path / "src"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert git_state(package) is None  # no repository
    git(tmp_path, "init", "-q")
    assert git_state(package) is None  # an installed copy in somebody else's repository
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "x")
    clean = git_state(package)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    assert clean["diff_sha256"] is None
    (package / "__init__.py").write_text("x = 1\n")
    first = git_state(package)
    assert first["dirty"] is True
    assert first["commit"] == clean["commit"]
    (package / "__init__.py").write_text("x = 2\n")
    assert git_state(package)["diff_sha256"] not in (None, first["diff_sha256"])
    git(tmp_path, "checkout", "-q", ".")
    (package / "new.py").write_text("")
    assert git_state(package)["dirty"] is True


def test_without_git_the_manifest_is_still_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert make()["code"]["git"] is None


def test_folder_digests_are_plain_sha256_by_name(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.json").write_text("{}")
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_text("never")
    assert folder_sha256(tmp_path) == {
        "a.txt": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
        "sub/b.json": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }
    assert text_sha256("hello") == folder_sha256(tmp_path)["a.txt"]


def test_row_digest_sees_content_and_order_not_key_order():
    rows = [{"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"}]
    assert rows_sha256(rows) == hashlib.sha256(b'{"a":"2","q":"1+1"}\n{"a":"4","q":"2+2"}\n').hexdigest()
    assert rows_sha256([{"a": "2", "q": "1+1"}, rows[1]]) == rows_sha256(rows)
    assert rows_sha256(rows[::-1]) != rows_sha256(rows)
