"""Buckets by broadcast over a process group of its own: NCCL between GPUs, gloo between CPUs. Reaches other nodes.

The group is made from torch's backend classes and not by init_process_group: trainer and sampler each have a default
group already.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from grpo_recipes.generation.sync.contract import RefitError

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_recipes.generation.sync.link import Peer

STALL_S = 300.0  # the other end neither sends, nor fails, nor dies
POLL_S = 0.0005
REASON_S = 5.0  # for whoever failed to say why, or to be seen gone


def start_store(host: str) -> Any:
    """Held by the sender, from a port that the kernel chose and that is never let go."""
    return dist.TCPStore(host, 0, None, is_master=True, wait_for_workers=False)


def join_store(host: str, port: int) -> Any:
    return dist.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=30))


class Group:
    """Rank 0 sends, all others receive."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.device = device
        limit = timedelta(seconds=STALL_S)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, size, limit)

    def broadcast(self, tensor: Tensor, peers: list[Peer]) -> None:
        """Raises RefitError as soon as a peer says that it failed, or is gone: nobody waits for the dead."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._backend.broadcast([tensor], options)
        deadline = time.monotonic() + STALL_S
        while not work.is_completed():
            for peer in peers:
                peer.check()
            if time.monotonic() > deadline:
                raise RefitError(f"no progress for {STALL_S:.0f} s")
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError:
            # The sockets of a process that dies close one after another, and this one's end names nobody.
            until = time.monotonic() + REASON_S
            while time.monotonic() < until:
                for peer in peers:
                    peer.check()
                time.sleep(POLL_S)
            raise
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


class SendingBuffer:
    def __init__(self, nbytes: int, group: Group) -> None:
        self._group = group
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=group.device)
        self.handle = None

    def opened(self) -> None:
        """Nothing to forget: receivers have buffers of their own."""

    def send(self, nbytes: int, peers: list[Peer]) -> None:
        self._group.broadcast(self.buffer[:nbytes], peers)


class ReceivingBuffer:
    def __init__(self, group: Group, sender: Peer) -> None:
        self._group, self._sender = group, sender

    def receive(self, nbytes: int) -> Tensor:
        """A buffer of its own: a loader may keep what it is handed until a layer is complete."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
        self._group.broadcast(buffer, [self._sender])
        return buffer
