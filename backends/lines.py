"""Lines: a TCP connection between each two ranks of a control, for messages of a few bytes.

They cost a third of what Gloo's messages do: no thread of its own must wake up at either end before one has come.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
import weakref
from collections.abc import Iterable
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING

from tokenring.backends.control import Control
from tokenring.backends.meeting import Meeting
from tokenring.errors import BackendUnavailable, PeerLost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

INTERFACES = "GLOO_SOCKET_IFNAME"  # a user who has told Gloo need not tell us
ANSWER_SECONDS = 2.0  # for who has connected to say which rank it is: strangers must not keep the others waiting
SIOCGIFADDR = 0x8915  # <linux/sockios.h>
STRANGERS = 128  # for whom there is room at the door while none is let in
IF_INET6 = Path("/proc/net/if_inet6")
LINK_LOCAL = "20"  # a scope there: such addresses mean nothing to others
CONNECTS, HEARS = "connected to all ranks", "exchanged with all ranks"


class Lines:
    """What one rank says to others and hears from them, in order from each to each. Made by all ranks together.

    Raises PeerLost, which names who cannot be reached; BackendUnavailable if this rank has no address.
    """

    def __init__(self, control: Control, group: ProcessGroup) -> None:
        self._control = control
        self._lines: dict[int, socket.socket] = {}
        weakref.finalize(self, _close, self._lines)
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=control.world_size + STRANGERS) as door:
            mine = json.dumps([host, door.getsockname()[1]])
            places = Meeting(group, control.timeout_seconds).gather("where they listen", mine)
            deadline = time.monotonic() + control.timeout_seconds
            for rank in range(control.rank):
                host, port = json.loads(places[rank])
                self._keep(rank, self._call(rank, host, port, deadline))
                self.say(rank, self._card(control.rank))
            cards = {self._card(rank): rank for rank in range(control.rank + 1, control.world_size)}
            while cards:
                self._answer(door, cards, deadline)

    def _keep(self, rank: int, line: socket.socket) -> None:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(self._control.timeout_seconds)
        self._lines[rank] = line

    def _call(self, rank: int, host: str, port: int, deadline: float) -> socket.socket:
        try:
            return socket.create_connection((host, port), max(0.1, deadline - time.monotonic()))
        except OSError as error:
            hint = f"it listens at {host}: if that is not where it can be reached, set {INTERFACES} there"
            raise self._control.lost(rank, CONNECTS, f"{error} ({hint})") from None

    def _answer(self, door: socket.socket, cards: dict[bytes, int], deadline: float) -> None:
        """Let in the next that connects if it brings one of the cards, which then is gone. Send away whoever else."""
        door.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            line, _ = door.accept()
        except OSError as error:
            raise self._control.lost(min(cards.values()), CONNECTS, f"it has not connected: {error}") from None
        line.settimeout(ANSWER_SECONDS)
        try:
            self._keep(cards.pop(_receive(line, len(self._card(0)))), line)
        except (OSError, KeyError):
            line.close()

    def _card(self, rank: int) -> bytes:
        """By which a rank is known. The control's name is new, and only its ranks know it."""
        return f"tokenring {self._control.name} {rank:8}".encode()

    def say(self, rank: int, data: bytes) -> None:
        """It leaves at once: so little fits any connection's buffer."""
        try:
            self._lines[rank].sendall(data)
        except OSError as error:
            raise self._lost(rank, error) from None

    def hear(self, rank: int, size_bytes: int) -> bytes:
        """The next bytes that the rank says, for which it waits. Raises PeerLost."""
        try:
            return _receive(self._lines[rank], size_bytes)
        except OSError as error:
            raise self._lost(rank, error) from None

    def _lost(self, rank: int, error: OSError) -> PeerLost:
        late = isinstance(error, TimeoutError)
        return self._control.lost(rank, HEARS, "no answer" if late else str(error))


def _receive(line: socket.socket, size_bytes: int) -> bytes:
    """So many bytes, each of whose parts must come within the line's time limit. Raises OSError."""
    data = b""
    while len(data) < size_bytes:
        part = line.recv(size_bytes - len(data))
        if not part:
            raise ConnectionResetError("connection closed by peer")
        data += part
    return data


def _close(lines: dict[int, socket.socket]) -> None:
    for line in lines.values():
        line.close()


# ---------- where this rank is reached


def own_address() -> str:
    """Of the interface that GLOO_SOCKET_IFNAME names first; else what the host's name means; else the loopback.

    The same that Gloo takes. Raises BackendUnavailable if that interface has none.
    """
    named = next(filter(None, os.environ.get(INTERFACES, "").split(",")), None)
    if named is not None:
        return interface_address(named)
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    return next(filter(_is_ours, (str(each[4][0]) for each in found)), "127.0.0.1")


def interface_address(name: str) -> str:
    """Its first IPv4 address, else its first IPv6 one that others can use. Raises BackendUnavailable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(found[20:24])
        except OSError:
            pass
    if (address := next(iter(_ipv6_addresses(name)), None)) is not None:
        return address
    there = ", ".join(each for _, each in socket.if_nameindex())
    raise BackendUnavailable(
        f"{INTERFACES} names the interface {name!r}, which has no address here. Interfaces of this host: {there}"
    )


def _ipv6_addresses(name: str) -> Iterable[str]:
    try:
        rows = IF_INET6.read_text().splitlines()
    except OSError:
        return
    for address, _, _, scope, _, interface in map(str.split, rows):
        if interface == name and scope != LINK_LOCAL:
            yield str(IPv6Address(int(address, 16)))


def _is_ours(address: str) -> bool:
    """Whether one can listen at it: a host's name may mean some other host."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True
