"""Covers: math-verify in a thread: every score silently 0, or a hung worker leaks.

Graders here are injected functions that misbehave; the pool must give an error for those and judge all others.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_recipes.environments.pool import GraderPool, Verdict

GRADERS = """
import os, signal, subprocess, sys, time
from pathlib import Path

def grade(action, value=0.0):
    if action == "hang": time.sleep(1000)
    if action == "compute": 9 ** 9 ** 9  # one C call that holds the interpreter's lock
    if action == "exit": sys.exit(7)
    if action == "end": os._exit(7)
    if action == "babble": [os.write(fd, b"[1.0, null]\\n" * 9) for fd in range(3, 20) if Path(f"/proc/self/fd/{fd}").exists()]
    if action == "die": os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise": raise ValueError("no such number")
    if action == "flood": print("x" * 5_000_000); sys.stderr.write("y" * 5_000_000); os.write(1, b"z" * 100_000)
    if action == "fork": os.fork()
    if action == "child": Path(value).write_text(str(subprocess.Popen(["sleep", "1000"]).pid)); return 1.0
    if action == "child then hang": grade("child", value); grade("hang")
    if action == "memory": bytearray(16 * 2**30)
    if action == "nan": return float("nan")
    if action == "size": return len(value)
    if action == "slow": time.sleep(value)
    if action == "pid": return os.getpid()
    if action == "modules": return any(name in sys.modules for name in ("torch", "pytest", "multiprocessing.spawn"))
    return value
"""


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GraderPool]]:
    (tmp_path / "misbehaving.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    pools: list[GraderPool] = []

    def make(num_workers: int = 2, timeout_s: float = 5.0, chunk: int = 1) -> GraderPool:
        pools.append(GraderPool("misbehaving:grade", num_workers, timeout_s, chunk))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def alive(pid: int) -> bool:
    """False for zombies, too: nobody may be left to reap them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("chunk", [1, 8, 100])
def test_order_is_kept(make_pool: Callable[..., GraderPool], chunk: int) -> None:
    tasks = [("ok", i / 8) for i in range(64)]
    assert make_pool(3, chunk=chunk).grade(tasks) == [Verdict(i / 8, None) for i in range(64)]


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("hang", "no verdict within 1 s"),
        ("compute", "no verdict within 1 s"),
        ("exit", "SystemExit: 7"),
        ("end", "the grader's process ended (exit status 7)"),
        ("die", "the grader's process ended (signal SIGKILL)"),
        ("raise", "ValueError: no such number"),
        ("memory", "MemoryError: "),
        ("nan", "the score is nan"),
    ],
)
def test_misbehaviour_is_an_error_and_the_others_are_judged(
    make_pool: Callable[..., GraderPool], action: str, error: str, chunk: int
) -> None:
    good = ("ok", 0.25)
    verdicts = make_pool(2, timeout_s=1.0, chunk=chunk).grade([good, (action,), good, (action,), (action,), good, good])
    right, wrong = Verdict(0.25, None), Verdict(None, error)
    assert verdicts == [right, wrong, right, wrong, wrong, right, right]


@pytest.mark.parametrize("action", ["flood", "fork"])
def test_output_and_forks_do_not_disturb(make_pool: Callable[..., GraderPool], action: str) -> None:
    pool = make_pool(1)
    tasks = [(action, 0.5), ("ok", 1.0)] * 10
    assert pool.grade(tasks) == [Verdict(0.5, None), Verdict(1.0, None)] * 10


def test_worker_that_writes_into_its_channel_loses_its_judgement(make_pool: Callable[..., GraderPool]) -> None:
    verdicts = make_pool(1).grade([("babble", 0.5), ("ok", 1.0)])
    assert verdicts == [Verdict(None, "the grader's process ended (signal SIGKILL)"), Verdict(1.0, None)]


def test_large_responses_pass_whatever_the_chunk(make_pool: Callable[..., GraderPool]) -> None:
    tasks = [("size", "é" * 3_000_000), ("slow", 0.6), ("size", "x" * 3_000_000)]
    scores = [verdict.score for verdict in make_pool(1, timeout_s=1.0, chunk=3).grade(tasks)]
    assert scores == [3_000_000, 0.6, 3_000_000]


def test_each_judgement_has_its_own_deadline(make_pool: Callable[..., GraderPool]) -> None:
    tasks = [("slow", 0.5)] * 4  # 2 s in all, on one worker
    assert make_pool(1, timeout_s=1.0, chunk=4).grade(tasks) == [Verdict(0.5, None)] * 4


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_worker_killed_while_idle_is_replaced(make_pool: Callable[..., GraderPool]) -> None:
    pool = make_pool(1)
    assert pool.grade([("ok", 1.0)]) == [Verdict(1.0, None)]
    (worker,) = children(pool.server_pid)
    os.kill(worker, signal.SIGKILL)
    assert pool.grade([("ok", 1.0)] * 2)[1] == Verdict(1.0, None)
    assert children(pool.server_pid) != [worker]


def test_worker_killed_while_judging(make_pool: Callable[..., GraderPool]) -> None:
    pool = make_pool(1, timeout_s=60)
    pool.grade([("ok", 1.0)])
    killer = f"import os, time; time.sleep(0.5); os.kill({children(pool.server_pid)[0]}, 9)"
    subprocess.Popen([sys.executable, "-c", killer])
    started = time.monotonic()
    verdicts = pool.grade([("hang",), ("ok", 1.0)])
    assert verdicts == [Verdict(None, "the grader's process ended (signal SIGKILL)"), Verdict(1.0, None)]
    assert time.monotonic() - started < 40  # noticed at once, not at the deadline


@pytest.mark.parametrize("moment", ["starting", "idle", "judging"])
def test_server_killed_is_started_again_and_loses_nothing(make_pool: Callable[..., GraderPool], moment: str) -> None:
    pool = make_pool(2)
    killer = f"import os, time; time.sleep(0.5); os.kill({pool.server_pid}, 9)"
    workers: list[int] = []
    if moment != "starting":
        pool.grade([("ok", 1.0)])
        workers = children(pool.server_pid)
    if moment == "judging":
        subprocess.Popen([sys.executable, "-c", killer])
        tasks = [("slow", 0.1)] * 40
    else:
        os.kill(pool.server_pid, signal.SIGKILL)
        tasks = [("ok", 1.0)]
    assert pool.grade(tasks) == [Verdict(task[1], None) for task in tasks]
    assert wait_until(lambda: not any(map(alive, workers)), 5)


def test_workers_are_reused_and_light(make_pool: Callable[..., GraderPool]) -> None:
    pool = make_pool(2)
    pids = {verdict.score for verdict in pool.grade([("pid",)] * 40)}
    assert pids <= set(children(pool.server_pid))
    assert pool.grade([("modules",)]) == [Verdict(0.0, None)]


def test_close_ends_workers_and_what_they_started(make_pool: Callable[..., GraderPool], tmp_path: Path) -> None:
    pool = make_pool(2)
    pool.grade([("child", str(tmp_path / "pid"))])
    pids = [pool.server_pid, *children(pool.server_pid), int((tmp_path / "pid").read_text())]
    assert len(pids) == 4
    assert all(map(alive, pids))
    pool.close()
    assert wait_until(lambda: not any(map(alive, pids)), 5)
    pool.close()  # twice is once


def test_overrun_ends_what_the_worker_started(make_pool: Callable[..., GraderPool], tmp_path: Path) -> None:
    pool = make_pool(1, timeout_s=1.0)
    assert pool.grade([("child then hang", str(tmp_path / "pid"))]) == [Verdict(None, "no verdict within 1 s")]
    assert wait_until(lambda: not alive(int((tmp_path / "pid").read_text())), 5)


@pytest.mark.parametrize("last", ["ok", "hang", "compute", "child then hang"])
def test_all_end_when_their_parent_is_killed(tmp_path: Path, last: str) -> None:
    (tmp_path / "misbehaving.py").write_text(GRADERS)
    parent = textwrap.dedent(f"""
        import os, sys, threading, time
        sys.path[:0] = {[str(tmp_path), *sys.path]!r}
        from grpo_recipes.environments.pool import GraderPool
        pool = GraderPool("misbehaving:grade", 2, 100.0)
        pool.grade([("ok", 1.0)] * 8)
        print(pool.server_pid, open(f"/proc/{{pool.server_pid}}/task/{{pool.server_pid}}/children").read(), flush=True)
        threading.Thread(target=pool.grade, args=([("{last}", {str(tmp_path / "pid")!r})] * 2,)).start()
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    """)
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 3
    if last == "child then hang":
        pids.append(int((tmp_path / "pid").read_text()))
    assert wait_until(lambda: not any(map(alive, pids)), 5)


def test_grader_that_cannot_be_imported_is_no_verdict() -> None:
    pool = GraderPool("grpo_recipes.no_such_module:grade", 1, 1.0)
    with pytest.raises(RuntimeError, match="did not start: ModuleNotFoundError: No module named"):
        pool.grade([("ok",)])
    pool.close()


def test_nothing_to_judge(make_pool: Callable[..., GraderPool]) -> None:
    assert make_pool().grade([]) == []
