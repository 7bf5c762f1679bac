"""Workers as processes of this machine: spawned, each on a pipe of its own."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, Self

from grpo_recipes.cluster import wire
from grpo_recipes.cluster.contract import Placement, WorkerDied, WorkerError, WorkerFactory, WorkerTimeout
from grpo_recipes.cluster.cores import threads_per_worker
from grpo_recipes.cluster.ports import PortPlan
from grpo_recipes.cluster.process_worker import Reply, Setup, main

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MASTER = "master"  # name of the rendezvous port in a port plan
GRACE_S = 0.5  # after a first error: a process that died explains the errors of the ranks that waited for it
EXIT_S = 10.0  # for workers to leave by themselves when the group is closed


class ProcessGroup:
    """A WorkerGroup of local processes, in one torch.distributed group (gloo on CPU, nccl on CUDA).

    Every worker has torchrun's environment variables; one on the CPU sees no GPU. This process never touches a GPU.
    Workers end when this process ends, however it does. They ignore SIGINT and SIGTERM: this process decides.

    Args:
        factory: makes a worker; picklable.
        world_size: workers.
        device: "cpu" or "cuda" (one GPU each, by local rank).
        threads: of each worker's tensor operations; default: OMP_NUM_THREADS, or the cores divided by the workers.
        ports: a plan with a port named "master" to take; by default one of its own.
        time_limit_s: longest a call, or the start, may take; None for no limit.

    Raises:
        Whatever a factory raises, as `call` does; WorkerDied, WorkerTimeout.
    """

    def __init__(
        self,
        factory: WorkerFactory,
        world_size: int,
        *,
        device: str = "cpu",
        threads: int | None = None,
        ports: PortPlan | None = None,
        time_limit_s: float | None = None,
    ) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from __all__

        self.world_size = world_size
        self.threads = threads or threads_per_worker(world_size)
        self._time_limit_s = time_limit_s
        self._call = 0
        self._ended: str | None = None
        listening = (ports or PortPlan([MASTER])).hand_over(MASTER)
        port = listening.getsockname()[1]
        # The store lives here and not in rank 0: its port is held from the moment it is planned.
        self._store = TCPStore(
            LOOPBACK, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        log.info("%d workers on %s, %d threads each, rendezvous on port %d", world_size, device, self.threads, port)
        pickled = pickle.dumps(factory)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        spawn = multiprocessing.get_context("spawn")
        atexit.register(self.shutdown)  # before multiprocessing's own, which would wait for the workers
        for rank in range(world_size):
            place = f"cuda:{rank}" if device == "cuda" else device
            placement = Placement(rank, world_size, local_rank=rank, local_world_size=world_size, device=place)
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=main, args=(theirs, Setup(placement, LOOPBACK, port, self.threads, pickled)), name=f"rank{rank}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect("start")

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.scatter(method, [args] * self.world_size)

    def scatter(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        if self._ended:
            raise RuntimeError(f"the worker group is closed: {self._ended}")
        if len(per_rank_args) != self.world_size:
            raise ValueError(f"{len(per_rank_args)} sets of arguments for {self.world_size} workers")
        self._call += 1
        encoded: dict[int, bytes] = {}  # arguments that several ranks share are written once
        messages = [
            encoded.get(id(args)) or encoded.setdefault(id(args), wire.dumps((self._call, method, args)))
            for args in per_rank_args
        ]
        for rank, message in enumerate(messages):
            try:
                self._pipes[rank].send_bytes(message)
            except OSError:  # the pipe is closed at the other end
                self._report_death(rank, method)
        return self._collect(method)

    def _collect(self, method: str) -> list[Any]:
        """One reply from each rank to the current call. Replies to a call that was interrupted here are thrown away."""
        values: dict[int, Any] = {}
        deadline = None if self._time_limit_s is None else time.monotonic() + self._time_limit_s
        while len(values) < self.world_size:
            pending = {self._pipes[rank]: rank for rank in range(self.world_size) if rank not in values}
            sentinels = {process.sentinel: rank for rank, process in enumerate(self._processes)}
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([*pending, *sentinels], left)
            if not ready:
                self._report_timeout(sorted(pending.values()), method)
            for pipe, rank in pending.items():
                if pipe not in ready:
                    continue
                try:
                    reply: Reply = wire.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._report_death(rank, method)
                if reply.call != self._call:
                    continue
                if reply.traceback is not None:
                    self._report_error(rank, method, reply)
                values[rank] = reply.value
            for sentinel, rank in sentinels.items():
                if sentinel in ready:
                    self._report_death(rank, method)
        return [values[rank] for rank in range(self.world_size)]

    # -- ends ----------------------------------------------------------------------------------------------------
    def _report_error(self, rank: int, method: str, reply: Reply) -> NoReturn:
        text = f"rank {rank} of {self.world_size} raised in {method}:\n{reply.traceback}"
        sentinels = {process.sentinel: r for r, process in enumerate(self._processes)}
        dead = wait(list(sentinels), GRACE_S)
        if dead:
            self._report_death(sentinels[dead[0]], method, note=text)
        self._kill(f"rank {rank} raised in {method}")
        if reply.error is None:
            raise WorkerError(text)
        error = pickle.loads(reply.error)
        error.add_note(text)
        raise error

    def _report_death(self, rank: int, method: str, note: str | None = None) -> NoReturn:
        process = self._processes[rank]
        process.join(EXIT_S)
        how = (
            f"rank {rank} of {self.world_size} (process {process.pid}) {exit_status(process.exitcode)} during {method}"
        )
        self._kill(how)
        error = WorkerDied(how)
        if note:
            error.add_note(note)
        raise error

    def _report_timeout(self, ranks: list[int], method: str) -> NoReturn:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)  # they write where they are to stderr
        time.sleep(GRACE_S)
        how = f"{method} took more than {self._time_limit_s} s on rank {', '.join(map(str, ranks))}"
        self._kill(how)
        raise WorkerTimeout(f"{how}; their stacks are on stderr")

    def _kill(self, why: str) -> None:
        self._ended = why
        for process in self._processes:
            process.kill()
        self._clean_up()

    def shutdown(self) -> None:
        if self._ended:
            return
        self._ended = "shut down"
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + EXIT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                log.warning("%s did not end within %g s: killed", process.name, EXIT_S)
                process.kill()
        self._clean_up()

    def _clean_up(self) -> None:
        atexit.unregister(self.shutdown)
        for process in self._processes:
            process.join(EXIT_S)
        for pipe in self._pipes:
            pipe.close()
        del self._store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def exit_status(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
