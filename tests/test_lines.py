"""Connections between ranks that share no memory: what is said comes, in order; strangers, the lost and the silent."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenring import BackendUnavailable, PeerLost
from tokenring.backends import lines
from tokenring.backends.lines import Lines, own_address

SECONDS = 5.0


class Alone:
    """A control that is asked for nothing but who its rank is, and for the error when a peer is lost."""

    name = "0123456789abcdef"

    def __init__(self, rank: int, ranks: int, timeout_seconds: float = SECONDS) -> None:
        self.rank, self.world_size, self.timeout_seconds = rank, ranks, timeout_seconds

    def lost(self, peer: int, what: str, found: str) -> PeerLost:
        return PeerLost(f"rank {self.rank} {what} from rank {peer}: {found}", peer)


class Place:
    """Where threads meet in place of ranks. called: with what all brought, by one after the other before they go on."""

    def __init__(self, ranks: int, called: Callable[[list[str]], None] = lambda brought: None) -> None:
        self.brought, self.barrier, self.called = [""] * ranks, threading.Barrier(ranks), called
        self.one = threading.Lock()

    def gather(self, rank: int, text: str) -> list[str]:
        self.brought[rank] = text
        self.barrier.wait(SECONDS)
        with self.one:
            self.called(self.brought)
        return self.brought


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """The lines of all ranks, made at once; for a rank whose lines could not be made, the error."""
    made: list[list[Any]] = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def connect(ranks: int, timeout_seconds: float = SECONDS, place: Place | None = None) -> list[Any]:
        found: list[Any] = [None] * ranks
        meet = (place or Place(ranks)).gather

        def one(rank: int) -> None:
            try:
                found[rank] = Lines(Alone(rank, ranks, timeout_seconds), rank)  # type: ignore[arg-type]
            except Exception as error:
                found[rank] = error

        class Meeting:
            def __init__(self, rank: int, timeout_seconds: float) -> None:
                self.rank = rank

            def gather(self, what: str, text: str) -> list[str]:
                return meet(self.rank, text)

        monkeypatch.setattr(lines, "Meeting", Meeting)
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * SECONDS)
            assert not thread.is_alive()
        made.append(found)
        return found

    yield connect
    for found in made:
        found.clear()


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_hears_each_in_order(connected: Any, ranks: int) -> None:
    """Whatever the parts: a connection keeps no bounds of messages."""
    found = connected(ranks)
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    for a, b in pairs:
        found[a].say(b, bytes([a, b, 1]))
        found[a].say(b, bytes([a, b, 2, 3]))
    for a, b in pairs:
        assert found[b].hear(a, 5) == bytes([a, b, 1, a, b])
        assert found[b].hear(a, 2) == bytes([2, 3])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_they_end_with_what_holds_them(connected: Any) -> None:
    gc.collect()
    before = descriptors()
    found = connected(4)
    assert descriptors() == before + 12
    gc.disable()
    try:
        found.clear()
        assert descriptors() == before
    finally:
        gc.enable()


class TestStrangers:
    """Who comes to a rank's door and is none of its group."""

    @pytest.mark.parametrize("says", [
        b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 500,
        b"tokenring 0123456789abcdee        2",  # of another group
        b"tokenring 0123456789abcdef        0",  # the rank itself
        b"tokenring 0123456789abcdef        3",  # no rank
    ])  # fmt: skip
    def test_are_sent_away(self, connected: Any, monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
        monkeypatch.setattr(lines, "ANSWER_SECONDS", 0.1)
        came: list[socket.socket] = []

        def come(brought: list[str]) -> None:
            host, port = json.loads(brought[0])
            came.append(socket.create_connection((host, port), SECONDS))
            came[-1].sendall(says)

        found = connected(3, place=Place(3, come))
        found[0].say(2, b"well")
        assert found[2].hear(0, 4) == b"well"
        assert len(came) == 3
        for each in came:
            with each, contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b"", "it was kept"

    def test_the_name_is_what_counts(self, connected: Any) -> None:
        """A mutant of the above: who knows the group's name is let in."""
        came: list[socket.socket] = []

        def come(brought: list[str]) -> None:
            if not came:
                came.append(socket.create_connection(tuple(json.loads(brought[0])), SECONDS))
                came[-1].sendall(b"tokenring 0123456789abcdef        2")

        found = connected(2, place=Place(2, come))  # of two ranks: the third is none
        found[0].say(1, b"well")
        assert found[1].hear(0, 4) == b"well"
        came.pop().close()
        found = connected(3, place=Place(3, come))
        found[0].say(2, b"well")
        assert came[0].recv(4) == b"well"
        came[0].close()


class TestLost:
    def test_who_has_gone_is_named_at_once(self, connected: Any) -> None:
        found = connected(3)
        found[1].say(0, b"last")
        found[1] = None
        began = time.monotonic()
        assert found[0].hear(1, 4) == b"last"
        for rank in (0, 2):
            with pytest.raises(PeerLost, match="exchanged with all ranks from rank 1: connection closed") as caught:
                found[rank].hear(1, 1)
            assert caught.value.rank == 1
        assert time.monotonic() - began < 1

    def test_nothing_can_be_said_to_who_has_gone(self, connected: Any) -> None:
        found = connected(2)
        found[1] = None
        with pytest.raises(PeerLost, match=r"from rank 1: .*(reset|pipe)"):
            for _ in range(100):
                found[0].say(1, b"hello")
                time.sleep(0.01)

    def test_who_says_nothing_is_named_at_the_limit(self, connected: Any) -> None:
        found = connected(2, timeout_seconds=0.3)
        began = time.monotonic()
        with pytest.raises(PeerLost, match="from rank 0: no answer"):
            found[1].hear(0, 1)
        assert 0.2 < time.monotonic() - began < 1

    def test_who_does_not_connect_is_named(self, connected: Any) -> None:
        class Partly(Place):
            def gather(self, rank: int, text: str) -> list[str]:
                super().gather(rank, text)
                if rank == 1:
                    raise RuntimeError("it ends here")
                return self.brought

        found = connected(3, timeout_seconds=0.3, place=Partly(3))
        assert isinstance(found[0], PeerLost) and found[0].rank == 1
        assert "connected to all ranks from rank 1: it has not connected: timed out" in str(found[0])
        assert isinstance(found[2], PeerLost) and found[2].rank == 1
        assert "it listens at 127.0.0.1" in str(found[2]) and "GLOO_SOCKET_IFNAME" in str(found[2])


class TestOwnAddress:
    @pytest.mark.parametrize("named", ["lo", "lo,eth7", ",lo"])
    def test_of_the_interface(self, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
        assert own_address() == "127.0.0.1"

    def test_of_one_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
        with pytest.raises(BackendUnavailable, match=r"GLOO_SOCKET_IFNAME names the interface 'eth77'.*host: .*lo"):
            own_address()

    def test_of_one_with_ipv6_alone(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The first address that others can use."""
        table = tmp_path / "if_inet6"
        table.write_text(
            "00000000000000000000000000000001 01 80 10 80       lo\n"
            "fe80000000000000000000000000000a 02 40 20 80    eth77\n"
            "20010db8000000000000000000000007 02 40 00 80    eth77\n"
        )
        monkeypatch.setattr(lines, "IF_INET6", table)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
        assert own_address() == "2001:db8::7"
        monkeypatch.setattr(lines, "IF_INET6", tmp_path / "no such file")
        with pytest.raises(BackendUnavailable, match="eth77"):
            own_address()

    @pytest.mark.parametrize(("means", "address"), [
        (["127.0.0.1"], "127.0.0.1"),
        (["192.0.2.1", "127.0.0.1"], "127.0.0.1"),  # the first is for documentation: no host has it
        (["192.0.2.1"], "127.0.0.1"),
        ([], "127.0.0.1"),
    ])  # fmt: skip
    def test_of_the_hosts_name(self, monkeypatch: pytest.MonkeyPatch, means: list[str], address: str) -> None:
        def look_up(name: str, port: None, type: socket.SocketKind) -> list[Any]:
            assert name == socket.gethostname()
            if not means:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_INET, type, 6, "", (each, 0)) for each in means]

        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        assert own_address() == address
