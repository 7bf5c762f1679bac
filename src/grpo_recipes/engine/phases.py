"""Seconds and peak memory of each phase of a step."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux: writing 5 resets the peak resident size (man 5 proc)


def reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # not Linux, or not allowed: the peak is then that of the whole process
            CLEAR_REFS.write_text("5")


def peak_memory() -> int:
    """Bytes: allocated on the GPU, or resident in this process where there is none, since the last reset."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Phases:
    """Collects one step. `announce` hears each phase as it begins; `peak` returns and resets the ranks' peak memory."""

    announce: Callable[[str], None]
    peak: Callable[[], int]
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.announce(name)
        self.peak()
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.peak_bytes[f"peak_{name}"] = max(self.peak_bytes.get(f"peak_{name}", 0), self.peak())
