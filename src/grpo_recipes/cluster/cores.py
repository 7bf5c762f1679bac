"""How many threads a worker computes with: the cores this process may use, shared by the workers of the machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "<microseconds or max> <period>": what docker --cpus sets


def available_cores(quota_file: Path = CGROUP_QUOTA) -> int:
    """Cores in this process's affinity mask, fewer where the container's CPU quota allows fewer; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota_file.exists():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def threads_per_worker(local_workers: int) -> int:
    """OMP_NUM_THREADS where the user has set it, otherwise the available cores divided by the local workers."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdecimal() and int(chosen) else max(1, available_cores() // local_workers)
