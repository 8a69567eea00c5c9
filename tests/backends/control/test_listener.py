"""Who stands at a rank's listener and is none of its group holds nobody up, is counted, and takes little."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_sockets import SECONDS, Place
from test_sockets import connected as connected  # the fixture

from tokenring.backends.control import listener as listeners
from tokenring.backends.control.listener import RankListener
from tokenring.errors import PeerLost

HELLO, OTHER = b"hello 1", b"hello 2"
Say = Callable[[socket.socket], object]


def silent(connection: socket.socket) -> None:
    """As a port scan is, or a health check that waits to be greeted."""


def noisy(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\n" * 20)


def half(connection: socket.socket) -> None:
    """The beginning of a hello, and no more of it: its name is new each time, but not its first word."""
    connection.sendall(b"tokenring ")


@pytest.fixture
def connections() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


def come(made: list[socket.socket], place: tuple[str, int], count: int, say: Say = silent) -> None:
    for _ in range(count):
        made.append(socket.create_connection(place, SECONDS))
        with contextlib.suppress(ConnectionError):
            say(made[-1])


@pytest.mark.parametrize("say", [silent, noisy, half])
def test_hundreds_of_strangers_hold_nobody_up(connected: Any, connections: list[socket.socket], say: Say) -> None:
    """At 2 s for each, as one after the other, 300 would take ten minutes; the ranks have one."""

    def crowd(brought: list[str]) -> None:
        if not connections:
            come(connections, tuple(json.loads(brought[0])[1]), 300, say)

    found = connected(3, timeout_seconds=60.0, place=Place(3, crowd))
    assert not [each for each in found if isinstance(each, Exception)]
    found[0].send(2, b"well")
    assert found[2].recv(0, 4) == b"well"
    assert len(connections) == 300


def test_the_error_counts_them(connected: Any, connections: list[socket.socket]) -> None:
    class Crowded(Place):
        def gather(self, rank: int, text: str) -> list[str]:
            super().gather(rank, text)
            if rank == 1:
                come(connections, tuple(json.loads(self.brought[0])[1]), 12)
                raise RuntimeError("it ends here")
            return self.brought

    found = connected(2, timeout_seconds=2.0, place=Crowded(2))
    assert isinstance(found[0], PeerLost) and found[0].rank == 1
    assert "(it has not connected, while 12 connections said nothing of ours)" in str(found[0])


def accepted(
    listener: RankListener, hellos: set[bytes], seconds: float, silent_seconds: float = 60.0
) -> tuple[set[bytes], list[bytes]]:
    """Which hellos are missing in the end, and which came, in order."""
    came: list[bytes] = []

    def answer(hello: bytes, connection: socket.socket) -> None:
        came.append(hello)
        connection.close()

    return listener.accept(hellos, time.monotonic() + seconds, silent_seconds, answer), came


@pytest.fixture
def listener() -> Iterator[RankListener]:
    with RankListener("127.0.0.1", 2) as made:
        yield made


def test_the_oldest_lose_their_places(
    listener: RankListener, connections: list[socket.socket], monkeypatch: Any
) -> None:
    """So that what callers take is bounded, however many there are."""
    monkeypatch.setattr(listeners, "MOST_WAITING", 8)
    come(connections, listener.place, 20)
    before = len(os.listdir("/proc/self/fd"))
    assert accepted(listener, {HELLO}, 1.0) == ({HELLO}, [])
    assert len(listener._callers) == 8 and listener.unknown_callers == 20
    assert len(os.listdir("/proc/self/fd")) == before + 8
    gone = [each for each in connections if closed(each)]
    assert gone == connections[:12]


def closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False


def test_who_lost_its_place_may_come_again(
    listener: RankListener, connections: list[socket.socket], monkeypatch: Any
) -> None:
    monkeypatch.setattr(listeners, "MOST_WAITING", 2)
    come(connections, listener.place, 4)
    assert accepted(listener, {HELLO}, 0.5) == ({HELLO}, [])
    come(connections, listener.place, 1, lambda connection: connection.sendall(HELLO))
    assert accepted(listener, {HELLO}, SECONDS) == (set(), [HELLO])


def test_hellos_are_read_side_by_side(listener: RankListener, connections: list[socket.socket]) -> None:
    """Byte after byte, of two at once."""
    come(connections, listener.place, 2)

    def slowly() -> None:
        for a, b in zip(HELLO, OTHER, strict=True):
            connections[0].sendall(bytes([a]))
            connections[1].sendall(bytes([b]))
            time.sleep(0.02)

    speaking = threading.Thread(target=slowly)
    speaking.start()
    missing, came = accepted(listener, {HELLO, OTHER}, SECONDS)
    speaking.join()
    assert not missing and sorted(came) == [HELLO, OTHER] and listener.unknown_callers == 0


def test_a_hello_counts_once(listener: RankListener, connections: list[socket.socket]) -> None:
    come(connections, listener.place, 2, lambda connection: connection.sendall(HELLO))
    assert accepted(listener, {HELLO, OTHER}, 1.0) == ({OTHER}, [HELLO])
    assert listener.unknown_callers == 1


def test_silence_has_a_limit(listener: RankListener, connections: list[socket.socket]) -> None:
    come(connections, listener.place, 3)
    assert accepted(listener, {HELLO}, 1.0, silent_seconds=0.1) == ({HELLO}, [])
    assert not listener._callers and listener.unknown_callers == 3


def test_strangers_give_way_where_files_are_few(
    listener: RankListener, connections: list[socket.socket], monkeypatch: Any
) -> None:
    """Of this process: a rank is not refused for their sake. Without any, the error is for whoever asked."""
    come(connections, listener.place, 3)
    assert accepted(listener, {HELLO}, 0.5) == ({HELLO}, [])
    come(connections, listener.place, 1, lambda connection: connection.sendall(HELLO))
    took, listening = socket.socket.accept, listener._socket

    def accept(self: socket.socket) -> Any:
        if self is listening and len(listener._callers) > 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return took(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    assert accepted(listener, {HELLO}, SECONDS) == (set(), [HELLO])

    def none_left(self: socket.socket) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    for each in list(listener._callers):
        listener._refuse(each)
    come(connections, listener.place, 1)
    monkeypatch.setattr(socket.socket, "accept", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        accepted(listener, {HELLO}, SECONDS)
