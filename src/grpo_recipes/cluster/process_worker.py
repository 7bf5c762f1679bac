"""The main function of a worker process of ProcessGroup. Nothing heavy is imported before the threads are set."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

from grpo_recipes.cluster.contract import Placement

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PARENT_POLL_S = 1.0


@dataclass(frozen=True)
class Setup:
    placement: Placement
    master_address: str
    master_port: int  # of the store that the driver holds
    threads: int
    factory: bytes  # pickled WorkerFactory: unpickling it may import torch


@dataclass(frozen=True)
class Reply:
    call: int
    value: Any = None
    error: bytes | None = None  # pickled exception, None also where it cannot be pickled
    traceback: str | None = None  # set where the call raised


def main(pipe: Connection, setup: Setup) -> None:
    # The driver decides what a signal means (Ctrl-C reaches the whole terminal); when it goes, so do its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the driver asks where a call hangs
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    placement = setup.placement
    os.environ.update(
        RANK=str(placement.rank),
        WORLD_SIZE=str(placement.world_size),
        LOCAL_RANK=str(placement.local_rank),
        LOCAL_WORLD_SIZE=str(placement.local_world_size),
        MASTER_ADDR=setup.master_address,
        MASTER_PORT=str(setup.master_port),
        OMP_NUM_THREADS=str(setup.threads),
    )
    if not placement.device.startswith("cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from grpo_recipes.cluster import wire

    worker = None

    def build() -> None:
        nonlocal worker
        _join(setup)
        worker = pickle.loads(setup.factory)(placement)

    pipe.send_bytes(wire.dumps(attempt(0, build)))
    while True:
        try:
            call, method, args = wire.loads(pipe.recv_bytes())
        except EOFError:  # the driver is gone, or has closed the group
            break
        reply = attempt(call, lambda method=method, args=args: getattr(worker, method)(*args))
        pipe.send_bytes(encode(reply))
    _leave()


def attempt(call: int, work: Any) -> Reply:
    try:
        return Reply(call, value=work())
    except Exception as error:
        return _failed(call, error)


def _failed(call: int, error: Exception) -> Reply:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # some exceptions can be written and not read
    except Exception:  # whatever their own code raises
        data = None
    return Reply(call, error=data, traceback="".join(traceback.format_exception(error)))


def encode(reply: Reply) -> bytes:
    from grpo_recipes.cluster import wire

    try:
        return wire.dumps(reply)
    except Exception as error:  # the result cannot be pickled: that is the caller's to see
        return wire.dumps(_failed(reply.call, error))


def _join(setup: Setup) -> None:
    """The default process group, over the store of the driver: no rank has to find a free port."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(setup.threads)
    placement = setup.placement
    cuda = placement.device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(placement.local_rank)
    store = dist.TCPStore(setup.master_address, setup.master_port, placement.world_size, is_master=False)  # type: ignore[attr-defined]  # absent from __all__
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=placement.rank, world_size=placement.world_size
    )


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # Nothing is left to do: taking the interpreter apart, module by module, would take a second, and may wait for threads.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _follow_parent(parent_pid: int) -> None:
    """End with the driver, also in the middle of a collective that will never finish.

    The sentinel tells at once; the parent's id tells where a process that the driver forked still holds the sentinel.
    """
    parent = parent_process()
    assert parent is not None
    while not mp_connection.wait([parent.sentinel], PARENT_POLL_S) and os.getppid() == parent_pid:
        pass
    os._exit(1)
