"""The ports of a run: chosen once, outside the range from which the kernel hands out ports, and held until used."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_recipes.errors import UserError

log = logging.getLogger(__name__)

BASE = 20_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LINUX_DEFAULT = (32_768, 60_999)
FIRST_UNPRIVILEGED = 1_024
LAST = 65_535


def ephemeral_range(file: Path = EPHEMERAL_RANGE) -> tuple[int, int]:
    """First and last port that the kernel gives to outgoing connections."""
    if not file.exists():
        return LINUX_DEFAULT
    low, high = map(int, file.read_text().split())
    return low, high


def candidates(base: int, ephemeral: tuple[int, int]) -> Iterator[int]:
    """Ports in the order they are tried: from the base up to the ephemeral range, then others outside it, then inside.

    The last resort is for machines whose ephemeral range covers everything; a port held there is still the run's own.
    """
    low, high = ephemeral
    yield from range(base, low)
    yield from range(FIRST_UNPRIVILEGED, min(base, low))
    yield from range(high + 1, LAST + 1)
    yield from range(max(low, FIRST_UNPRIVILEGED), min(high, LAST) + 1)


class PortPlan:
    """One port for each name, the same from run to run on an idle machine.

    This process holds every port bound until `hand_over`, so that no other program, and no other run that plans at
    the same moment, can take it in between.

    Args:
        names: what the ports are for, in the order of their numbers.
        base: first port to try.
        host: address to bind; workers of one machine only need the loopback.
        ephemeral: first and last ephemeral port; read from the kernel by default.

    Raises:
        UserError: fewer free ports than names.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        base: int = BASE,
        host: str = "127.0.0.1",
        ephemeral: tuple[int, int] | None = None,
    ) -> None:
        self._sockets: dict[str, socket.socket] = {}
        ephemeral = ephemeral or ephemeral_range()
        ports = candidates(base, ephemeral)
        for name in names:
            self._sockets[name] = held = self._bind_next(host, ports)
            if ephemeral[0] <= held.getsockname()[1] <= ephemeral[1]:
                log.warning("port for %s lies in the ephemeral range %d-%d: no other is free", name, *ephemeral)
        self.ports = {name: held.getsockname()[1] for name, held in self._sockets.items()}

    def _bind_next(self, host: str, ports: Iterator[int]) -> socket.socket:
        for port in ports:
            # Without SO_REUSEADDR: two programs that both set it may bind the same port until one of them listens.
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                held.bind((host, port))
            except OSError:  # in use: try the next
                held.close()
            else:
                return held
        self.close()
        raise UserError("no free port", where=host, mend="end programs that hold ports, or widen the range below 32768")

    def hand_over(self, name: str) -> socket.socket:
        """The bound socket, not yet listening; the caller closes it or gives its descriptor away."""
        return self._sockets.pop(name)

    def close(self) -> None:
        """Let go of every port not handed over."""
        while self._sockets:
            self._sockets.popitem()[1].close()
