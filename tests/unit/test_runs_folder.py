import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.runs.folder import create_run, list_runs, next_attempt, open_run, process_alive, write_pid
from grpo_recipes.runs.manifest import add_attempt, write_manifest
from grpo_recipes.runs.metrics import MetricsLog
from grpo_recipes.runs.progress import Progress, read_progress, write_progress

MANIFEST = {"recipe": {"name": "tiny_arith", "version": "v1"}, "attempts": [{"attempt": 1, "resumed_from": 0}]}


def progress(**changes) -> Progress:
    first = Progress(
        attempt=1, step=7, max_steps=150, phase="generation", reward=0.5, accuracy=0.1 + 0.2, tokens_per_second=1234.5,
        started_at=1000.25, updated_at=1001.5, status="running",
    )  # fmt: skip
    return replace(first, **changes)


def test_create_makes_an_empty_house_and_its_paths(tmp_path):
    run = create_run(tmp_path / "runs" / "a")
    assert run.name == "a"
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "rollouts"]
    assert run.metrics_path == tmp_path / "runs" / "a" / "metrics.jsonl"


def test_create_takes_an_existing_empty_folder(tmp_path):
    (tmp_path / "a").mkdir()
    assert create_run(tmp_path / "a").rollouts_dir.is_dir()


def test_create_refuses_a_folder_in_use_and_names_both_ways_out(tmp_path):
    create_run(tmp_path / "a")
    with pytest.raises(UserError, match="not empty") as caught:
        create_run(tmp_path / "a")
    assert "--run-dir" in caught.value.mend
    assert "--resume" in caught.value.mend


def test_create_refuses_a_file(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        create_run(tmp_path / "a")


def test_create_says_so_where_it_cannot_write():
    with pytest.raises(UserError, match="cannot be made") as caught:
        create_run("/proc/grpo/a")  # not even root may make a folder here
    assert "--run-dir" in caught.value.mend


def test_create_below_a_file_is_a_user_error(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(UserError, match="cannot be made"):
        create_run(tmp_path / "a" / "b")


def test_open_names_the_nearest_run(tmp_path):
    run = create_run(tmp_path / "tiny_arith-1")
    write_manifest(run, MANIFEST)
    assert open_run(run.path) == run
    with pytest.raises(UserError, match="no such run folder") as caught:
        open_run(tmp_path / "tiny_arit-1")
    assert "tiny_arith-1" in caught.value.mend


def test_open_refuses_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="neither"):
        open_run(tmp_path)


def test_next_attempt_looks_at_manifest_and_metrics(tmp_path):
    run = create_run(tmp_path / "a")
    assert next_attempt(run) == 1
    write_manifest(run, MANIFEST)
    assert next_attempt(run) == 2
    write_manifest(run, add_attempt(MANIFEST, 2, 5))
    assert next_attempt(run) == 3
    MetricsLog(run, attempt=4, resumed_from=5).close()
    assert next_attempt(run) == 5


def test_progress_round_trips_exactly_and_leaves_no_temporary_file(tmp_path):
    run = create_run(tmp_path / "a")
    assert read_progress(run) is None
    for value in (progress(), progress(reward=None, accuracy=float("inf"), status="failed", message="full disk")):
        write_progress(run, value)
        assert read_progress(run) == value
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "progress.json", "rollouts"]


def test_damaged_progress_is_a_user_error(tmp_path):
    run = create_run(tmp_path / "a")
    run.progress_path.write_text('{"attempt": 1, "st')
    with pytest.raises(UserError, match="cannot be read"):
        read_progress(run)


def test_list_runs_newest_first_and_a_killed_job_is_dead(tmp_path):
    assert list_runs(tmp_path / "absent") == []
    (tmp_path / "not a run").mkdir()
    for name, started in (("old", 10.0), ("new", 20.0), ("killed", 5.0)):
        run = create_run(tmp_path / name)
        write_manifest(run, MANIFEST)
        write_progress(run, progress(started_at=started))
        write_pid(run)
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    write_pid(run, job.pid)
    assert process_alive(run) is True
    job.kill()
    while process_alive(run):  # until the kernel has made it a zombie; we have not waited for it yet
        time.sleep(0.01)
    found = list_runs(tmp_path)
    assert [(r.name, r.status) for r in found] == [("new", "running"), ("old", "running"), ("killed", "dead")]
    assert (found[0].recipe, found[0].version, found[0].step, found[0].max_steps) == ("tiny_arith", "v1", 7, 150)
    job.wait()
    assert process_alive(run) is False


def test_damaged_runs_do_not_hide_the_others(tmp_path):
    write_manifest(create_run(tmp_path / "good"), MANIFEST)
    for name, text in (("empty", "{}"), ("torn", '{"recipe"')):
        create_run(tmp_path / name).manifest_path.write_text(text)
    assert [(r.name, r.status) for r in list_runs(tmp_path)] == [
        ("empty", "damaged"), ("good", "starting"), ("torn", "damaged")
    ]  # fmt: skip


def test_a_process_id_used_again_is_not_the_job(tmp_path):
    run = create_run(tmp_path / "a")
    write_pid(run)
    pid, host, _ = run.pid_path.read_text().split()
    run.pid_path.write_text(f"{pid} {host} 1\n")  # began one tick after boot: another process
    assert process_alive(run) is False
    run.pid_path.write_text(f"{pid} elsewhere 1\n")
    assert process_alive(run) is None
    run.pid_path.write_text(f"{os.getpid()}\n")  # a bare id, as a shell writes it
    assert process_alive(run) is True


def test_a_recipe_without_manifest_is_a_run_that_starts(tmp_path):
    run = create_run(tmp_path / "a")
    run.recipe_path.write_text("description: x\n")
    assert [(r.name, r.status, r.recipe) for r in list_runs(tmp_path)] == [("a", "starting", None)]


def test_the_room_imports_no_heavy_library():
    code = (
        "import sys, grpo_recipes.runs.folder, grpo_recipes.runs.metrics, grpo_recipes.runs.manifest, "
        "grpo_recipes.runs.rollouts, grpo_recipes.runs.sinks, grpo_recipes.runs.progress\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'pydantic', 'omegaconf') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
