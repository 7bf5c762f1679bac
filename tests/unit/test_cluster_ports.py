"""The port plan and the share of cores."""

import os
import socket

import pytest

from grpo_recipes.cluster.cores import available_cores, threads_per_worker
from grpo_recipes.cluster.ports import BASE, PortPlan, candidates, ephemeral_range
from grpo_recipes.errors import UserError

NAMES = ["master", "refit", "engine"]


def test_ports_lie_below_the_ephemeral_range_and_repeat():
    """Covers: ports collide in the ephemeral range."""
    low, _ = ephemeral_range()
    assert low > BASE  # as Linux ships
    first = PortPlan(NAMES)
    ports = list(first.ports.values())
    assert list(first.ports) == NAMES
    assert ports == sorted(set(ports))
    assert all(BASE <= port < low for port in ports)
    first.close()
    again = PortPlan(NAMES)
    assert again.ports == first.ports
    again.close()


def test_two_plans_made_at_once_share_no_port():
    """Covers: ports collide between two runs of one machine."""
    first, second = PortPlan(NAMES), PortPlan(NAMES)
    assert not set(first.ports.values()) & set(second.ports.values())
    first.close()
    second.close()


def test_a_port_that_listens_is_passed_over():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        plan = PortPlan(["master"], base=taken, ephemeral=(taken + 100, taken + 200))
        assert taken < plan.ports["master"] < taken + 100
        plan.close()


def test_a_port_handed_over_can_listen_and_the_rest_is_let_go():
    plan = PortPlan(["master", "refit"])
    with plan.hand_over("master") as held:
        held.listen()
        plan.close()
        with socket.create_connection(("127.0.0.1", plan.ports["master"]), timeout=5):
            pass
        with socket.socket() as other:
            other.bind(("127.0.0.1", plan.ports["refit"]))


def test_order_of_candidates():
    assert list(candidates(20_000, (20_003, 65_530)))[:3] == [20_000, 20_001, 20_002]
    narrow = list(candidates(20_000, (1_030, 65_530)))
    assert narrow[:6] == [1_024, 1_025, 1_026, 1_027, 1_028, 1_029]
    assert narrow[6:11] == [65_531, 65_532, 65_533, 65_534, 65_535]
    assert narrow[11] == 1_030  # inside it only when nothing else is left
    assert max(narrow) == 65_535
    assert len(set(narrow)) == len(narrow)


def test_no_free_port_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("grpo_recipes.cluster.ports.candidates", lambda base, ephemeral: iter([]))
    with pytest.raises(UserError, match="no free port"):
        PortPlan(["master"])


def test_ephemeral_range_is_read_from_the_kernel(tmp_path):
    (tmp_path / "range").write_text("40000\t50000\n")
    assert ephemeral_range(tmp_path / "range") == (40_000, 50_000)
    assert ephemeral_range(tmp_path / "absent") == (32_768, 60_999)


def test_cores_follow_affinity_and_container_quota(tmp_path):
    cores = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    assert available_cores(quota) == cores
    quota.write_text("max 100000\n")
    assert available_cores(quota) == cores
    quota.write_text("50000 100000\n")
    assert available_cores(quota) == 1
    quota.write_text("100000000 100000\n")
    assert available_cores(quota) == cores


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("grpo_recipes.cluster.cores.available_cores", lambda: 8)
    assert [threads_per_worker(n) for n in (1, 3, 8, 16)] == [8, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_worker(8) == 3
