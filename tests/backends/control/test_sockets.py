"""Connections between ranks that share no memory: what is said comes, in order; strangers, the lost and the silent."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import patient

from tokenring import BackendUnavailable, ConfigurationError, PeerLost
from tokenring.backends.control import sockets
from tokenring.backends.control.listener import RankListener
from tokenring.backends.control.sockets import PeerSockets, own_address

SECONDS = 5.0


class Alone:
    """A control that is asked for nothing but who its rank is, and for the error when a peer is lost."""

    name = "0123456789abcdef"

    def __init__(self, rank: int, ranks: int, timeout_seconds: float = SECONDS) -> None:
        self.rank, self.world_size, self.timeout_seconds = rank, ranks, timeout_seconds

        self.failed: list[BaseException] = []

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)

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
    """The sockets of all ranks, made at once; for a rank whose sockets could not be made, the error."""
    made: list[list[Any]] = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def connect(ranks: int, timeout_seconds: float = SECONDS, place: Place | None = None) -> list[Any]:
        found: list[Any] = [None] * ranks
        meet = (place or Place(ranks)).gather

        def one(rank: int) -> None:
            try:
                found[rank] = PeerSockets(Alone(rank, ranks, timeout_seconds), rank)  # type: ignore[arg-type]
            except Exception as error:
                found[rank] = error

        class Meeting:
            def __init__(self, rank: int, timeout_seconds: float) -> None:
                self.rank = rank

            def gather(self, what: str, text: str) -> list[str]:
                return meet(self.rank, text)

        monkeypatch.setattr(sockets, "StoreGather", Meeting)
        threads = [threading.Thread(target=one, args=(rank,), daemon=True, name=str(rank)) for rank in range(ranks)]
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


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not sockets._is_ours(request.param):
        pytest.skip(f"no {request.param} here")
    monkeypatch.setattr(sockets, "own_address", lambda: request.param)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_hears_each_in_order(connected: Any, ranks: int) -> None:
    """Whatever the parts: a connection keeps no bounds of messages."""
    found = connected(ranks)
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    for a, b in pairs:
        found[a].send(b, bytes([a, b, 1]))
        found[a].send(b, bytes([a, b, 2, 3]))
    for a, b in pairs:
        assert found[b].recv(a, 5) == bytes([a, b, 1, a, b])
        assert found[b].recv(a, 2) == bytes([2, 3])


def test_a_message_may_come_in_parts(connected: Any) -> None:
    found = connected(2)
    later = threading.Timer(0.1, found[0].send, (1, b"ll"))
    found[0].send(1, b"we")
    later.start()
    assert found[1].recv(0, 4) == b"well"
    later.join()


def test_waits_can_be_interrupted(connected: Any) -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    found, before = connected(2), signal.signal(signal.SIGALRM, interrupt)
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            found[0].recv(1, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < patient(SECONDS) / 2


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
    """Who comes to a rank's listener and is none of its group; and one of it who is late."""

    @pytest.mark.parametrize("says", [
        b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 500,
        b"tokenring 0123456789abcdee        2",  # of another group
        b"tokenring 0123456789abcdef        0",  # the rank itself
        b"tokenring 0123456789abcdef        3",  # no rank
    ])  # fmt: skip
    def test_are_sent_away(self, connected: Any, monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
        monkeypatch.setattr(sockets, "ANSWER_SECONDS", 0.1)
        came: list[socket.socket] = []

        def come(brought: list[str]) -> None:
            _, (host, port) = json.loads(brought[0])
            came.append(socket.create_connection((host, port), SECONDS))
            came[-1].sendall(says)

        found = connected(3, place=Place(3, come))
        found[0].send(2, b"well")
        assert found[2].recv(0, 4) == b"well"
        assert len(came) == 3
        for each in came:
            with each, contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b"", "it was kept"

    def test_the_name_is_what_counts(self, connected: Any) -> None:
        """A mutant of the above: who knows the group's name is let in."""
        came: list[socket.socket] = []

        def come(brought: list[str]) -> None:
            if not came:
                came.append(socket.create_connection(tuple(json.loads(brought[0])[1]), SECONDS))
                came[-1].sendall(b"tokenring 0123456789abcdef        2")

        found = connected(2, place=Place(2, come))  # of two ranks: the third is none
        found[0].send(1, b"well")
        assert found[1].recv(0, 4) == b"well"
        came.pop().close()
        found = connected(3, timeout_seconds=0.5, place=Place(3, come))
        found[0].send(2, b"well")
        heard = came[0].makefile("rb").read(39)
        assert heard == b"tokenring 0123456789abcdef        0well", heard
        assert isinstance(found[2], PeerLost) and found[2].rank == 0
        came[0].close()

    def test_who_is_late_is_called_again(self, connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A rank may have so many callers, or be so slow, that it is sent away like a stranger."""
        hello = PeerSockets._hello
        late: list[int] = []

        def slow(self: PeerSockets, rank: int) -> bytes:
            if self._control.rank == rank == 1 and not late:
                late.append(rank)
                time.sleep(0.5)
            return hello(self, rank)

        monkeypatch.setattr(sockets, "ANSWER_SECONDS", 0.1)
        monkeypatch.setattr(PeerSockets, "_hello", slow)
        found = connected(3)
        assert late == [1]
        found[0].send(1, b"well")
        assert found[1].recv(0, 4) == b"well"

    def test_who_sends_byte_after_byte_is_not_waited_for(self) -> None:
        mine, its = socket.socketpair()
        with mine, its:
            its.sendall(b"x")
            more = [threading.Timer(0.1 * at, its.send, (b"x",)) for at in range(1, 5)]
            for each in more:
                each.start()
            with pytest.raises(TimeoutError):
                sockets._receive(mine, 5, time.monotonic() + 0.25)
            for each in more:
                each.join()

    def test_visitors_do_not_keep_a_rank_beyond_its_limit(self, connected: Any) -> None:
        """As a health check does, that connects and leaves again and again."""
        over = threading.Event()

        def visit(host: str, port: int) -> None:
            with contextlib.suppress(OSError):  # the listener closes
                while not over.wait(0.01):
                    socket.create_connection((host, port), SECONDS).close()

        class Visited(Place):
            def gather(self, rank: int, text: str) -> list[str]:
                super().gather(rank, text)
                if rank == 1:
                    raise RuntimeError("it ends here")
                threading.Thread(target=visit, args=json.loads(text)[1], daemon=True).start()
                return self.brought

        began = time.monotonic()
        found = connected(2, timeout_seconds=0.3, place=Visited(2))
        over.set()
        assert isinstance(found[0], PeerLost) and found[0].rank == 1
        assert time.monotonic() - began < patient(2.0)


class TestLost:
    def test_who_has_gone_is_named_at_once(self, connected: Any) -> None:
        found = connected(3)
        found[1].send(0, b"last")
        found[1] = None
        began = time.monotonic()
        assert found[0].recv(1, 4) == b"last"
        for rank in (0, 2):
            with pytest.raises(PeerLost, match="exchanged with all ranks from rank 1: connection closed") as caught:
                found[rank].recv(1, 1)
            assert caught.value.rank == 1
        assert time.monotonic() - began < patient(1.0)

    def test_nothing_can_be_said_to_who_has_gone(self, connected: Any) -> None:
        found = connected(2)
        found[1] = None
        with pytest.raises(PeerLost, match=r"from rank 1: .*(reset|pipe)"):
            for _ in range(100):
                found[0].send(1, b"hello")
                time.sleep(0.01)

    def test_who_says_nothing_is_named_at_the_limit(self, connected: Any) -> None:
        found = connected(2, timeout_seconds=0.3)
        began = time.monotonic()
        with pytest.raises(PeerLost, match="from rank 0: no answer"):
            found[1].recv(0, 1)
        assert 0.2 < time.monotonic() - began < patient(1.0)

    def test_who_does_not_connect_is_named(self, connected: Any) -> None:
        class Partly(Place):
            def gather(self, rank: int, text: str) -> list[str]:
                super().gather(rank, text)
                if rank == 1:
                    raise RuntimeError("it ends here")
                return self.brought

        found = connected(3, timeout_seconds=0.3, place=Partly(3))
        assert isinstance(found[0], PeerLost) and found[0].rank == 1
        assert "connected to all ranks from rank 1: timed out (it has not connected)" in str(found[0])
        assert isinstance(found[2], PeerLost) and found[2].rank == 1
        assert "it listens at 127.0.0.1" in str(found[2]) and "GLOO_SOCKET_IFNAME" in str(found[2])

    def test_who_answers_in_its_place_is_not_taken_for_it(self, connected: Any) -> None:
        """As where two hosts both take their own name for a loopback address."""
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                line, _ = listener.accept()
                with line:
                    line.recv(35)
                    line.sendall(b"tokenring 0123456789abcdee        0")

            threading.Thread(target=answer, daemon=True).start()

            class Misled(Place):
                def gather(self, rank: int, text: str) -> list[str]:
                    said = super().gather(rank, text)
                    return [json.dumps(["", listener.getsockname()]), *said[1:]] if rank else said

            found = connected(2, timeout_seconds=0.5, place=Misled(2))
        assert isinstance(found[1], PeerLost) and found[1].rank == 0
        assert "somebody else answers" in str(found[1]) and "GLOO_SOCKET_IFNAME" in str(found[1])

    def test_who_has_no_address_is_named_on_all_ranks_alike(self, connected: Any, monkeypatch: Any) -> None:
        listener = sockets._listener

        def some(callers: int) -> RankListener:
            if threading.current_thread().name == "1":
                raise BackendUnavailable("no such interface")
            return listener(callers)

        monkeypatch.setattr(sockets, "_listener", some)
        found = connected(3)
        assert {type(each) for each in found} == {BackendUnavailable}
        assert {str(each) for each in found} == {"rank 1 cannot listen for the others: no such interface"}

    def test_no_peer_is_to_blame_for_too_few_files(self, connected: Any, monkeypatch: Any) -> None:
        def none_left(*args: Any) -> socket.socket:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(socket, "create_connection", none_left)
        found = connected(2, timeout_seconds=0.3)
        assert isinstance(found[0], PeerLost) and isinstance(found[1], ConfigurationError)
        assert "rank 1 needs a connection to each of 1 others" in str(found[1]) and "ulimit -n" in str(found[1])


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
        monkeypatch.setattr(sockets, "IF_INET6", table)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
        assert own_address() == "2001:db8::7"
        monkeypatch.setattr(sockets, "IF_INET6", tmp_path / "no such file")
        with pytest.raises(BackendUnavailable, match="eth77"):
            own_address()

    @pytest.mark.parametrize(("means", "address"), [
        (["127.0.0.1"], "127.0.0.1"),
        (["192.0.2.1", "127.0.0.1"], "127.0.0.1"),  # the first is for documentation: no host has it
        (["192.0.2.1"], "127.0.0.1"),
        (["2001:db8::7", "127.0.0.1"], "127.0.0.1"),
        ([], "127.0.0.1"),
    ])  # fmt: skip
    def test_of_the_hosts_name(self, monkeypatch: pytest.MonkeyPatch, means: list[str], address: str) -> None:
        def look_up(name: str, port: None, type: socket.SocketKind) -> list[Any]:
            assert name == socket.gethostname()
            if not means:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_UNSPEC, type, 6, "", (each, 0)) for each in means]

        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        assert own_address() == address
