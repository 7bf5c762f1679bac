"""One refit from the trainer's rank 0 to every worker of every sampler: what is said, and when.

A socket to each receiver carries small messages; the bytes of a bucket go by the transport. Whoever fails says so on the
socket, and whoever dies closes it, so that the others raise at once and never wait in a collective for the dead.

    sender                          receiver
    Begin(plan, handle)     ->      opens the buffer
                            <-      Ready
    Send(bucket)            ->                              (then the bytes)
                            <-      Taken                   (its own copy: the sender fills the buffer again while
    ...                             the loader loads)
    End                     ->
                            <-      Loaded
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from grpo_recipes.generation.sync import broadcast, shared_memory
from grpo_recipes.generation.sync.contract import Layout, RefitError, layouts_of

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_recipes.policy.contract import WeightSpec

CONNECT_S = 25.0
STALL_S = 300.0  # longest between two messages of a peer that is alive, such as while a loader processes a layer

Link = Literal["ipc", "broadcast"]


@dataclass(frozen=True)
class Address:
    """Where a sender waits. Plain values, so that any RPC carries them."""

    transport: str
    host: str
    port: int
    store_port: int  # of the broadcast's rendezvous; 0 for ipc
    key: bytes  # whoever connects must know it: messages are pickles


@dataclass(frozen=True)
class Begin:
    rank: int  # of the receiver, from 1
    size: int  # receivers and the sender
    layouts: tuple[Layout, ...]
    nbytes: int  # of the buffer
    handle: Any


@dataclass(frozen=True)
class Send:
    bucket: int


@dataclass(frozen=True)
class Say:
    """Ready, Taken, End or Loaded."""

    what: str


@dataclass(frozen=True)
class Fault:
    reason: str


class Peer:
    """The other end of one socket."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self.name = connection, name
        self._inbox: deque[Any] = deque()

    def tell(self, message: Any) -> None:
        """Raises RefitError: the peer is gone."""
        try:
            self._connection.send(message)
        except OSError:
            self.check()  # why, it may have said
            raise RefitError(f"{self.name} is gone") from None

    def check(self) -> None:
        """Raises RefitError if the peer failed or is gone. Does not wait."""
        try:
            while self._connection.poll():
                self._put(self._connection.recv())
        except (EOFError, OSError):
            if not self._inbox:
                raise RefitError(f"{self.name} is gone") from None

    def hear(self, seconds: float = STALL_S) -> Any:
        """The next message. Raises RefitError: the peer failed, is gone or says nothing for so long."""
        if not self._inbox:
            try:
                if not self._connection.poll(seconds):
                    raise RefitError(f"{self.name} has said nothing for {seconds:.0f} s")
                self._put(self._connection.recv())
            except (EOFError, OSError):
                raise RefitError(f"{self.name} is gone") from None
        return self._inbox.popleft()

    def _put(self, message: Any) -> None:
        if isinstance(message, Fault):
            raise RefitError(f"{self.name}: {message.reason}")
        self._inbox.append(message)

    def hear_all_said(self, what: str, seconds: float = STALL_S) -> None:
        heard = self.hear(seconds)
        if heard != Say(what):
            raise RefitError(f"{self.name} said {heard} and not {what}")

    def close(self) -> None:
        self._connection.close()


class Sender:
    """The trainer's rank 0, for one refit.

    Args:
        receivers: how many will connect.
        host: an address of this machine that they reach.
        device: where buckets are packed.
    """

    def __init__(self, transport: Link, receivers: int, *, host: str, device: torch.device) -> None:
        self._receivers, self._device = receivers, device
        self._listener = socket.create_server((host, 0))
        self._store = broadcast.start_store(host) if transport == "broadcast" else None
        self.address = Address(
            transport,
            host,
            self._listener.getsockname()[1],
            self._store.port if self._store else 0,
            secrets.token_bytes(32),
        )
        self._peers: list[Peer] = []

    def send(self, plan: Sequence[WeightSpec], buckets: Iterable[dict[str, Tensor]]) -> int:
        """Every bucket to every receiver, until all have loaded them. Returns the bytes of the tensors, sent once.

        Raises:
            RefitError: here or at a receiver something went wrong; names the tensor, or the tensors of the bucket.
        """
        layouts = layouts_of(plan)
        try:
            self._accept()
            largest = max(layout.nbytes for layout in layouts)
            sending = self._begin(layouts, largest)
            number = sent = 0
            for number, bucket in enumerate(buckets, start=1):
                if number > len(layouts):
                    raise RefitError(f"{next(iter(bucket), 'a bucket')} is not of the plan")
                layout = layouts[number - 1]
                layout.pack(bucket, sending.buffer)
                self._tell(Send(number - 1))
                try:
                    sending.send(layout.nbytes, self._peers)
                    self._hear("Taken")
                except Exception as error:
                    raise RefitError(f"{error}, while {_named(layout)} travelled") from None
                sent += sum(slot.stop - slot.start for slot in layout.slots)
            if number < len(layouts):
                raise RefitError(f"{layouts[number].slots[0].name} is missing, and whatever comes after it")
            self._tell(Say("End"))
            self._hear("Loaded")
            return sent
        except BaseException as error:
            for peer in self._peers:
                _tell_quietly(peer, Fault(f"the trainer: {error}"))
            raise
        finally:
            self.close()

    def _accept(self) -> None:
        deadline = time.monotonic() + CONNECT_S
        while len(self._peers) < self._receivers:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                raise RefitError(
                    f"{len(self._peers)} of {self._receivers} workers of samplers connected within {CONNECT_S:.0f} s"
                ) from None
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            self._peers.append(Peer(connection, f"the sampler's worker {len(self._peers)}"))

    def _begin(self, layouts: Sequence[Layout], nbytes: int) -> Any:
        size = len(self._peers) + 1
        sending: Any = None
        if self._store is None:
            sending = shared_memory.SendingBuffer(nbytes, self._device)
        try:
            for rank, peer in enumerate(self._peers, start=1):
                peer.tell(Begin(rank, size, tuple(layouts), nbytes, sending and sending.handle))
            if self._store is not None:  # every rank makes the group at the same time
                sending = broadcast.SendingBuffer(nbytes, broadcast.Group(self._store, 0, size, self._device))
            self._hear("Ready")
        finally:
            if sending is not None:
                sending.opened()
        return sending

    def _tell(self, message: Any) -> None:
        for peer in self._peers:
            peer.tell(message)

    def _hear(self, what: str) -> None:
        for peer in self._peers:
            peer.hear_all_said(what)

    def close(self) -> None:
        self._listener.close()
        for peer in self._peers:
            peer.close()


class Receiver:
    """A worker of a sampler, for one refit.

    Args:
        device: where tensors are handed to the loader.
    """

    def __init__(self, address: Address, device: torch.device) -> None:
        self.address, self._device = address, device
        connected = socket.create_connection((address.host, address.port), CONNECT_S)
        connected.setblocking(True)
        connection = Connection(connected.detach())
        answer_challenge(connection, address.key)
        deliver_challenge(connection, address.key)
        self._sender = Peer(connection, "the trainer")
        self.tensors = 0

    def load(self, load: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
        """Hand every tensor to `load`, in the plan's order, one bucket at a time.

        Raises:
            RefitError: the trainer failed, or is gone. Whatever `load` raises. The trainer hears of it.
        """
        last = ""

        def followed() -> Iterator[tuple[str, Tensor]]:
            nonlocal last
            for name, tensor in self._received():
                last = name
                yield name, tensor

        tensors = followed()
        try:
            load(tensors)
            left = next(tensors, None)
            if left is not None:
                raise RefitError(f"the loader did not ask for {left[0]}")
        except BaseException as error:
            reason = str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"
            if last and not isinstance(error, RefitError):
                reason += f", while {last} was loaded"
            _tell_quietly(self._sender, Fault(reason))
            raise RefitError(reason) from error
        else:
            self._sender.tell(Say("Loaded"))
        finally:
            self._sender.close()

    def _received(self) -> Iterator[tuple[str, Tensor]]:
        begin = self._sender.hear()
        receiving: Any
        if self.address.transport == "broadcast":
            store = broadcast.join_store(self.address.host, self.address.store_port)
            receiving = broadcast.ReceivingBuffer(
                broadcast.Group(store, begin.rank, begin.size, self._device), self._sender
            )
        else:
            receiving = shared_memory.ReceivingBuffer(begin.handle, begin.nbytes, self._device)
        self._sender.tell(Say("Ready"))
        for number, layout in enumerate(begin.layouts):
            message = self._sender.hear()
            if message != Send(number):
                raise RefitError(f"the trainer said {message} where {_named(layout)} were due")
            buffer = receiving.receive(layout.nbytes)
            self._sender.tell(Say("Taken"))
            for name, tensor in layout.unpack(buffer):
                self.tensors += 1
                yield name, tensor
            del buffer, tensor
        self._sender.hear_all_said("End")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._sender.close()


def _named(layout: Layout) -> str:
    first, last = layout.slots[0].name, layout.slots[-1].name
    return first if first == last else f"{first} to {last}"


def _tell_quietly(peer: Peer, fault: Fault) -> None:
    with contextlib.suppress(RefitError):  # it knows, or is gone
        peer.tell(fault)
