"""Sockets: a TCP connection between each two ranks of a control, for messages of a few bytes.

They cost less than Gloo's messages, each of which wakes a thread of its own at both ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenring.backends.control.control import Control
from tokenring.backends.control.listener import TOO_MANY_FILES, RankListener
from tokenring.backends.control.store_gather import StoreGather
from tokenring.errors import BackendUnavailable, ConfigurationError, PeerLost, TokenRingError

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

INTERFACES = "GLOO_SOCKET_IFNAME"  # a user who has told Gloo need not tell us
ANSWER_SECONDS = 2.0  # for who has connected to say which rank it is; others are heard meanwhile
PAUSE_SECONDS = 0.05  # before a rank is called again
MOST_SECONDS = 1e6  # that a socket waits: the milliseconds of more overflow
CONNECTS, EXCHANGES = "connected to all ranks", "exchanged with all ranks"
NOT_CONNECTED = "it has not connected"
SIOCGIFADDR = 0x8915  # <linux/sockios.h>
IF_INET6 = Path("/proc/net/if_inet6")
LINK_LOCAL = "20"  # a scope there: such addresses mean nothing to others


class PeerSockets:
    """The sockets of one rank to all others, made by all ranks together; messages between two ranks keep their order.

    Raises PeerLost, which names who cannot be reached; BackendUnavailable, on all ranks alike, if one has no address;
    ConfigurationError if this process may not open as many files.
    """

    def __init__(self, control: Control, group: Held) -> None:
        self._control = control
        self._connections: dict[int, socket.socket] = {}
        weakref.finalize(self, _close, self._connections)
        meeting = StoreGather(group, control.timeout_seconds)
        with ExitStack() as until_met:
            listener, trouble = None, ""
            try:
                listener = until_met.enter_context(_listener(control.world_size))
            except (BackendUnavailable, OSError) as error:
                trouble = f"rank {control.rank} cannot listen for the others: {error}"
            where = listener.place if listener else ()
            said = [json.loads(each) for each in meeting.gather("where they listen", json.dumps([trouble, where]))]
            if trouble := "; ".join(filter(None, (each for each, _ in said))):
                raise BackendUnavailable(trouble)
            assert listener is not None
            self._connect(listener, [place for _, place in said])

    # ---------- connecting

    def _connect(self, listener: RankListener, places: list[list[Any]]) -> None:
        """Connect to the ranks before this one, and accept those after it."""
        deadline = time.monotonic() + self._control.timeout_seconds
        for rank in range(self._control.rank):
            host, port = places[rank]
            self._connect_to(rank, host, port, deadline)
        self._accept(listener, range(self._control.rank + 1, self._control.world_size), deadline)

    def _connect_to(self, rank: int, host: str, port: int, deadline: float) -> None:
        """Connect to a rank; each side says who it is. If that came too late (many callers), connect again."""
        hint = f"it listens at {host}: if that is not where it can be reached, set {INTERFACES} there"
        while rank not in self._connections:
            try:
                connection = socket.create_connection((host, port), _left(deadline))
            except OSError as error:
                raise self._cannot(rank, error, hint) from None
            with ExitStack() as unless_kept:
                unless_kept.enter_context(connection)
                try:
                    connection.sendall(self._hello(self._control.rank))
                    answer = _receive(connection, len(self._hello(rank)), deadline)
                except OSError as error:
                    if time.monotonic() >= deadline or not isinstance(error, ConnectionError):
                        raise self._cannot(rank, error, hint) from None
                    time.sleep(PAUSE_SECONDS)
                    continue
                if answer != self._hello(rank):
                    raise self._control.lost(rank, CONNECTS, f"somebody else answers ({hint})")
                self._keep(rank, connection)
                unless_kept.pop_all()

    def _accept(self, listener: RankListener, ranks: range, deadline: float) -> None:
        """Accept these ranks, whoever else comes."""
        hellos = {self._hello(rank): rank for rank in ranks}

        def answer(hello: bytes, connection: socket.socket) -> None:
            connection.sendall(self._hello(self._control.rank))
            self._keep(hellos[hello], connection)

        try:
            missing = listener.accept(set(hellos), deadline, ANSWER_SECONDS, answer)
        except OSError as error:
            first = min(rank for rank in ranks if rank not in self._connections)
            raise self._cannot(first, error, NOT_CONNECTED) from None
        if missing:
            unknown = listener.unknown_callers
            others = f", while {unknown} connections said nothing of ours" if unknown else ""
            first = min(hellos[each] for each in missing)
            raise self._control.lost(first, CONNECTS, f"timed out ({NOT_CONNECTED}{others})")

    def _hello(self, rank: int) -> bytes:
        """Return the hello by which a rank is known. The control's name is new, and only its ranks know it."""
        return f"tokenring {self._control.name} {rank:8}".encode()

    def _keep(self, rank: int, connection: socket.socket) -> None:
        self._connections[rank] = connection
        connection.settimeout(min(self._control.timeout_seconds, MOST_SECONDS))
        with suppress(OSError):  # it has gone already, which shows when it is asked for something
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # firewalls forget idle ones

    def _cannot(self, rank: int, error: OSError, hint: str) -> TokenRingError:
        """Make the error for a connection that failed. If this process may open no more files, no peer is to blame."""
        if error.errno not in TOO_MANY_FILES:
            return self._control.lost(rank, CONNECTS, f"{error} ({hint})")
        self._control.fail(error)
        return ConfigurationError(
            f"rank {self._control.rank} needs a connection to each of {self._control.world_size - 1} others, and may "
            f"open no more files ({error}): allow more, as by ulimit -n {4 * self._control.world_size + 1024}"
        )

    # ---------- messages

    def send(self, rank: int, data: bytes) -> None:
        """Send data to a rank. It leaves at once: so little fits any socket's buffer. Raises PeerLost."""
        try:
            self._connections[rank].sendall(data)
        except OSError as error:
            raise self._lost(rank, error) from None

    def recv(self, rank: int, size_bytes: int) -> bytes:
        """Wait for the next size_bytes that the rank sends, and return them. Raises PeerLost."""
        try:
            return _receive(self._connections[rank], size_bytes)
        except OSError as error:
            raise self._lost(rank, error) from None

    def _lost(self, rank: int, error: OSError) -> PeerLost:
        late = isinstance(error, TimeoutError)
        return self._control.lost(rank, EXCHANGES, "no answer" if late else str(error))


def _listener(callers: int) -> RankListener:
    return RankListener(own_address(), callers)


def _left(deadline: float) -> float:
    """Return the seconds that a socket may wait until the deadline."""
    return min(max(0.01, deadline - time.monotonic()), MOST_SECONDS)


def _receive(connection: socket.socket, size_bytes: int, deadline: float | None = None) -> bytes:
    """Receive so many bytes; all by the deadline, or each part within the socket's own limit. Raises OSError."""
    data = b""
    while len(data) < size_bytes:
        if deadline is not None:
            connection.settimeout(_left(deadline))
        part = connection.recv(size_bytes - len(data))
        if not part:
            raise ConnectionResetError("connection closed by peer")
        data += part
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return data


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


# ---------- where this rank is reached


def interfaces() -> list[str]:
    """Return the interfaces that the user has set for Gloo; empty: whatever there is."""
    return [name for name in os.environ.get(INTERFACES, "").split(",") if name]


def own_address() -> str:
    """Return this host's address, the one that Gloo would take.

    That of the interface that GLOO_SOCKET_IFNAME names first; else what the host's name means; else the loopback.
    Raises BackendUnavailable if that interface has none.
    """
    if named := interfaces():
        return interface_address(named[0])
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    return next(filter(_is_ours, (str(each[4][0]) for each in found)), "127.0.0.1")


def interface_address(name: str) -> str:
    """Return the first IPv4 address, else the first IPv6 one that others can use. Raises BackendUnavailable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(found[20:24])
        except OSError:
            pass
    if (address := next(_ipv6_addresses(name), None)) is not None:
        return address
    there = ", ".join(each for _, each in socket.if_nameindex())
    raise BackendUnavailable(
        f"{INTERFACES} names the interface {name!r}, which has no address here. Interfaces of this host: {there}"
    )


def _ipv6_addresses(name: str) -> Iterator[str]:
    try:
        rows = IF_INET6.read_text().splitlines()
    except OSError:
        return
    for address, _, _, scope, _, interface in map(str.split, rows):
        if interface == name and scope != LINK_LOCAL:
            yield str(IPv6Address(int(address, 16)))


def _is_ours(address: str) -> bool:
    """Return True if this host can listen at the address: a host's name may mean some other host."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as tried:
            tried.bind((address, 0))
    except OSError:
        return False
    return True
