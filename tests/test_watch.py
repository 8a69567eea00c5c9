"""The watch over messages that only streams wait for: when it lets them go on, and whom the next call names."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tokenring import PeerLost
from tokenring.backends.watch import Watch


class Board:
    def __init__(self) -> None:
        self.noted: list[int | None] = []

    def note_waiting(self, peer: int | None) -> None:
        self.noted.append(peer)


class Other:
    """A process, and whether it is gone."""

    def __init__(self, state: str | None = None) -> None:
        self.found = state

    def state(self, seen_from: Any) -> str | None:
        return self.found


class FakeControl:
    """What the watch asks of a control. shared None: ranks on several machines."""

    def __init__(self, seconds: float, shared: bool = True) -> None:
        self.timeout_seconds, self.rank, self.broken = seconds, 0, None
        self.board, self.members = Board(), [Other(), Other()]
        self.shared = self.board if shared else None
        self.hopeless = False

    def is_hopeless(self, peer: int) -> bool:
        return self.hopeless

    def lost(self, peer: int, what: str, found: str) -> PeerLost:
        self.broken = PeerLost(f"rank {peer}: {what}: {found}", peer)  # type: ignore[assignment]
        return self.broken  # type: ignore[return-value]


def until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def make(seconds: float, shared: bool = True) -> tuple[FakeControl, list[int], Watch]:
    control, released = FakeControl(seconds, shared), list[int]()
    return control, released, Watch(control, lambda: released.append(1))  # type: ignore[arg-type]


def named(watch: Watch) -> int | None:
    with pytest.raises(PeerLost) as caught:
        watch.check()
    return caught.value.rank


def test_nothing_ends_within_the_limit() -> None:
    control, released, watch = make(0.4)
    done = threading.Event()
    watch.add(done.is_set, 1, "waited for kv1")
    watch.check()
    assert until(lambda: len(released) > 1)  # again, as long as anything is under way
    assert 1 in control.board.noted
    assert named(watch) == 1
    assert str(control.broken) == "rank 1: waited for kv1: no end within 0.4 s"
    watch.check()  # once: what comes then finds the group broken
    done.set()
    assert until(lambda: not watch._under_way)
    count = len(released)
    time.sleep(0.3)
    assert len(released) == count
    watch.close()


@pytest.mark.parametrize("shared", [True, False])
def test_a_peer_that_is_gone(shared: bool) -> None:
    """Long before the limit."""
    control, released, watch = make(60.0, shared)
    watch.add(lambda: False, 1, "waited for kv1")
    time.sleep(0.3)
    assert not released
    control.hopeless, control.members[1].found = True, "gone"
    assert until(lambda: bool(released), 2.0) and named(watch) == 1
    assert control.board.noted == [] or shared  # the store of ranks apart is not asked, nor told
    watch.close()


def test_a_slow_device_is_no_lost_peer() -> None:
    """The limit counts from the last that ended: a host may be far ahead."""
    _, released, watch = make(0.5)
    ends = [threading.Event() for _ in range(4)]
    for each in ends:
        watch.add(each.is_set, 1, "waited for kv1")
    for each in ends:
        time.sleep(0.3)
        each.set()
    assert until(lambda: not watch._under_way)
    watch.check()
    assert not released
    watch.close()


def test_the_limit_begins_anew_after_a_pause() -> None:
    """A mutant would count from the first message ever."""
    _, released, watch = make(0.4)
    watch.add(lambda: True, 1, "waited for kv1")
    time.sleep(0.8)
    done = threading.Event()
    watch.add(done.is_set, 1, "waited for kv1")
    time.sleep(0.2)
    assert not released
    done.set()
    watch.close()


@pytest.mark.parametrize("close", [True, False])
def test_its_thread_ends_with_it(close: bool) -> None:
    _, _, watch = make(60.0)
    watch.add(lambda: True, 1, "waited for kv1")
    thread, weak = watch._thread, weakref.ref(watch)
    assert thread is not None
    if close:
        watch.close()
    del watch
    gc.collect()
    assert weak() is None
    thread.join(3.0)
    assert not thread.is_alive()
