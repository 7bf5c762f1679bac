"""Worker groups as local processes, and the ways they fail."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from grpo_recipes.cluster.contract import Placement, WorkerDied, WorkerTimeout
from grpo_recipes.cluster.process import ProcessGroup
from grpo_recipes.errors import UserError

pytestmark = pytest.mark.parity


@dataclass
class Worker:
    placement: Placement
    scale: int

    def where(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        return self.placement, [os.environ[name] for name in names], int(os.environ["MASTER_PORT"])

    def threads(self):
        return torch.get_num_threads()

    def pid(self):
        return os.getpid()

    def scaled(self, tensor):
        return self.scale * tensor

    def total(self, value):
        tensor = torch.tensor(float(value))
        dist.all_reduce(tensor)
        return tensor.item()

    def fail(self, how, rank):
        """The named rank fails; the others wait for it in a collective that it never enters."""
        if self.placement.rank != rank:
            return self.total(1)
        if how == "raise":
            raise KeyError("planted")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


def make(scale, placement):
    return Worker(placement, scale)


def make_badly(placement):
    if placement.rank == 1:
        raise UserError("model folder missing", where="policy.model_name")
    return Worker(placement, 1)


def group_of(world_size=2, **options):
    return ProcessGroup(functools.partial(make, 3), world_size, **options)


def alive(pid):
    """Not a zombie either: those wait for nobody but a parent that does not reap."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_two_processes_work_together_until_one_raises(monkeypatch):
    """Covers: an error on one rank hangs the others; it raises on all within seconds."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with group_of() as group:
        (first, env0, port), (second, env1, port1) = group.call("where")
        assert first == Placement(0, 2, 0, 2, "cpu")
        assert second == Placement(1, 2, 1, 2, "cpu")
        assert env0 == ["0", "2", "0", "2", "127.0.0.1"]
        assert env1 == ["1", "2", "1", "2", "127.0.0.1"]
        assert port == port1
        assert 20_000 <= port < 32_768
        assert group.call("threads") == [group.threads] * 2
        assert group.scatter("total", [(1,), (2,)]) == [3.0, 3.0]
        large = torch.arange(1_000_000)
        results = group.scatter("scaled", [(large,), (large[:5],)])
        assert results[0].equal(3 * large)
        assert results[1].tolist() == [0, 3, 6, 9, 12]
        with pytest.raises(ValueError, match="1 sets of arguments for 2 workers"):
            group.scatter("total", [(1,)])
        pids = group.call("pid")
        assert os.getpid() not in pids

        # Ctrl-C: the workers ignore it, and what the driver did not wait for is not taken for a later answer.
        for pid in pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        monkeypatch.setattr("grpo_recipes.cluster.process.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            group.call("total", 5)
        monkeypatch.undo()
        assert group.call("total", 6) == [12.0, 12.0]

        # An error on one rank leaves nobody waiting in a collective.
        start = time.monotonic()
        with pytest.raises(KeyError, match="planted") as caught:
            group.call("fail", "raise", 1)
        assert time.monotonic() - start < 30
        [note] = caught.value.__notes__
        assert note.startswith("rank 1 of 2 raised in fail:\nTraceback")
        assert 'raise KeyError("planted")' in note
        assert not any(map(alive, pids))
        with pytest.raises(RuntimeError, match="closed: rank 1 raised in fail"):
            group.call("pid")


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_killed_worker_is_named_and_ends_all_within_seconds():
    with group_of() as group:
        pids = group.call("pid")
        start = time.monotonic()
        with pytest.raises(WorkerDied, match=r"rank 1 of 2 \(process \d+\) was killed by SIGKILL"):
            group.call("fail", "killed", 1)
        assert time.monotonic() - start < 30
        assert not any(map(alive, pids))


def test_a_call_over_its_limit_says_where_it_hangs(capfd):
    with group_of(1, time_limit_s=60) as group:
        [pid] = group.call("pid")
        group._time_limit_s = 1
        with pytest.raises(WorkerTimeout, match="fail took more than 1 s on rank 0"):
            group.call("fail", "hang", 0)
        assert not alive(pid)
    assert "in fail" in capfd.readouterr().err


def test_user_errors_of_a_factory_arrive_as_such():
    with pytest.raises(UserError, match=r"policy\.model_name: model folder missing") as caught:
        ProcessGroup(make_badly, 2)
    assert caught.value.where == "policy.model_name"
    assert "rank 1 of 2 raised in start" in caught.value.__notes__[0]


def test_workers_end_when_the_driver_is_killed(tmp_path):
    """In the middle of a collective that nobody will finish."""
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent("""
        import os, threading, time
        from test_cluster_process import group_of
        if __name__ == "__main__":
            group = group_of()
            print(*group.call("pid"), flush=True)
            threading.Timer(1.0, os.kill, (os.getpid(), 9)).start()
            group.call("fail", "hang", 1)
        """)
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    driver = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=False
    )
    assert driver.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in driver.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_a_driver_that_forgets_to_shut_down_still_ends(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        "from test_cluster_process import group_of\n"
        'if __name__ == "__main__":\n'
        "    group = group_of(1)\n"
        '    print(*group.call("pid"), flush=True)\n'
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    driver = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    assert not alive(int(driver.stdout))
