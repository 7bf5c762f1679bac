"""The same work on several gloo processes, for tests of parallel layouts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT = timedelta(seconds=180)  # a rank that waits this long for another will wait for ever


def on_processes(count: int, work: Callable[..., Any], out: Path, *arguments: Any) -> list[Any]:
    """work(rank, *arguments) on every rank of one process group; the results by rank.

    Args:
        work: a top-level function; what it returns is pickled.
        out: an existing folder for the rendezvous and the results.
    """
    import torch.multiprocessing as mp

    mp.spawn(_join_and_work, (count, work, out, arguments), nprocs=count)
    return [pickle.loads(_result(out, rank).read_bytes()) for rank in range(count)]


def _join_and_work(rank: int, count: int, work: Callable[..., Any], out: Path, arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=count, timeout=LIMIT
    )
    _result(out, rank).write_bytes(pickle.dumps(work(rank, *arguments)))
    dist.destroy_process_group()


def _result(out: Path, rank: int) -> Path:
    return out / f"found-{rank}.pkl"
