"""Exchanges between ranks that share no memory, on threads and queues in place of connections: who hears what, in how
many messages, whoever says something else."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tokenring.backends.control import dissemination as apart
from tokenring.backends.control.dissemination import Apart

SECONDS = 5.0


class Wire:
    """Messages between the ranks, in order from each to each."""

    def __init__(self, ranks: int) -> None:
        self.ways: dict[tuple[int, int], queue.Queue[bytes]] = {
            (a, b): queue.Queue() for a in range(ranks) for b in range(ranks)
        }
        self.sent: Counter[int] = Counter()


class Ends:
    """What one rank has of it, with the calls of `Lines`."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank

    def send(self, rank: int, data: bytes) -> None:
        self.wire.sent[self.rank] += 1
        self.wire.ways[self.rank, rank].put(data)

    def recv(self, rank: int, size_bytes: int) -> bytes:
        came = self.wire.ways[rank, self.rank].get(timeout=SECONDS)
        assert len(came) == size_bytes, "a connection would give parts of messages"
        return came


class Alone:
    """A control that is asked for nothing but who its rank is."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.world_size = rank, ranks
        self.gather_apart: Callable[[bytes], Callable[[], list[bytes]]] | None = None
        self.texts_apart: Callable[[bytes, list[int]], list[bytes]] | None = None


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[list[bytes]], Counter[int]]]:
    """What each rank heard, when each said what is given; and how many messages each sent."""

    def run(said: list[bytes], times: int = 1, texts: bool = False) -> tuple[list[list[bytes]], Counter[int]]:
        wire, heard = Wire(len(said)), [[b""]] * len(said)
        failed: list[Exception] = []
        monkeypatch.setattr(apart, "PeerSockets", lambda control, group: Ends(wire, control.rank))

        def one(rank: int) -> None:
            control = Alone(rank, len(said))
            made = Apart(control, None)  # type: ignore[arg-type]
            assert control.gather_apart is not None and control.texts_apart is not None
            sizes = [len(each) for each in said]
            try:
                for _ in range(times):
                    gather, tell = control.gather_apart, control.texts_apart
                    heard[rank] = tell(said[rank], sizes) if texts else gather(said[rank])()
            except Exception as error:
                failed.append(error)
            del made

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(said))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
            assert not thread.is_alive()
        if failed:
            raise failed[0]
        return heard, wire.sent

    return run


@pytest.mark.parametrize(("ways", "ranks", "messages"), [
    *((2, ranks, (ranks - 1).bit_length()) for ranks in range(2, 10)),
    (3, 2, 1), (3, 3, 2), (3, 5, 3), (3, 9, 4), (3, 10, 5),
    (8, 2, 1), (8, 8, 7), (8, 9, 8), (8, 20, 9), (8, 24, 9), (8, 25, 10),
])  # fmt: skip
def test_all_say_the_same(
    ways: int, ranks: int, messages: int, exchanged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "WAYS", ways)
    heard, sent = exchanged([b"same"] * ranks, times=3)
    assert heard == [[b"same"] * ranks] * ranks
    assert set(sent.values()) == {3 * messages}


@pytest.mark.parametrize("ways", [2, 3, 8])
@pytest.mark.parametrize("ranks", range(2, 8))
def test_any_ranks_say_something_else(
    ranks: int, ways: int, exchanged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way to divide them in two; all hear everything, though most have no neighbour that differs."""
    monkeypatch.setattr(apart, "WAYS", ways)
    for odd in range(1, 1 << (ranks - 1)):
        said = [b"that" if odd >> rank & 1 else b"this" for rank in range(ranks)]
        heard, _ = exchanged(said)
        assert heard == [said] * ranks, odd


def test_all_say_something_else(exchanged: Any) -> None:
    said = [bytes([rank]) for rank in range(9)]
    heard, _ = exchanged(said)
    assert heard == [said] * 9


@pytest.mark.parametrize("sizes", [(5, 0, 0), (0, 0, 0), (1, 8, 9), (8, 16, 17, 0, 3), (40,), (24, 0)])
def test_texts_of_any_length(sizes: tuple[int, ...], exchanged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 8 bytes; who has nothing to say sends nothing."""
    monkeypatch.setattr(apart, "PART_BYTES", 8)
    said = [bytes(range(10 * rank, 10 * rank + size)) for rank, size in enumerate(sizes)]
    heard, sent = exchanged(said, times=2, texts=True)
    assert heard == [said] * len(sizes)
    assert [sent[rank] for rank in range(len(sizes))] == [2 * (len(sizes) - 1) * -(-size // 8) for size in sizes]


def test_a_difference_that_is_not_passed_on_is_noticed(exchanged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: who hears of a difference passes on that all is well, so that ranks far from it believe so."""
    said, say = [b"this", *[b"that"] * 7], Apart._say

    def all_is_well(self: Apart, steps: range, told: bytes) -> Any:
        return say(self, steps, told[:4] + b"\1" * len(told[4:]))

    monkeypatch.setattr(apart, "WAYS", 2)
    monkeypatch.setattr(Apart, "_say", all_is_well)
    monkeypatch.setattr(f"{__name__}.SECONDS", 0.2)
    with pytest.raises((AssertionError, queue.Empty)):
        assert exchanged(said)[0] == [said] * 8
