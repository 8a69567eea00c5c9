"""The watch over messages that only streams wait for: when it lets them go on, and whom the next call names."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from patience import patient

from tokenring import PeerLost
from tokenring.backends.control.watch import Watch


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
        self.ended: list[str] = []  # why the process would have been ended

    def is_hopeless(self, peer: int) -> bool:
        return self.hopeless

    def lost(self, peer: int, what: str, found: str) -> PeerLost:
        self.broken = PeerLost(f"rank {peer}: {what}: {found}", peer)  # type: ignore[assignment]
        return self.broken  # type: ignore[return-value]


def until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + patient(seconds)
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def make(seconds: float, shared: bool = True) -> tuple[FakeControl, list[int], Watch]:
    control, released = FakeControl(patient(seconds), shared), list[int]()
    watch = Watch(control, lambda: released.append(1), end_process=control.ended.append)  # type: ignore[arg-type]
    return control, released, watch


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
    assert str(control.broken) == f"rank 1: waited for kv1: no end within {patient(0.4):g} s"
    watch.check()  # once: what comes then finds the group broken
    done.set()
    assert until(lambda: not watch._under_way)
    count = len(released)
    time.sleep(patient(0.3))
    assert len(released) == count
    watch.close()


@pytest.mark.parametrize("shared", [True, False])
def test_a_peer_that_is_gone(shared: bool) -> None:
    """Long before the limit."""
    control, released, watch = make(60.0, shared)
    watch.add(lambda: False, 1, "waited for kv1")
    time.sleep(patient(0.3))
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
        time.sleep(patient(0.3))
        each.set()
    assert until(lambda: not watch._under_way)
    watch.check()
    assert not released
    watch.close()


@pytest.mark.parametrize("gone", [True, False])
def test_the_limit_counts_from_where_the_device_waits(gone: bool) -> None:
    """That a host is far ahead is nobody's fault; a peer may even have put its bytes and ended."""
    control, released, watch = make(0.3)
    control.hopeless = gone
    begun = threading.Event()
    watch.add(lambda: False, 1, "waited for kv1", begun.is_set)
    time.sleep(patient(0.9))
    assert not released
    watch.check()
    begun.set()
    assert until(lambda: bool(released)) and named(watch) == 1
    watch.close()


def test_a_message_that_is_there_when_the_device_comes_to_it() -> None:
    """It ends a moment after it began, however little of its peer is left."""
    control, released, watch = make(60.0)
    control.hopeless = True
    began = [time.monotonic() + patient(0.25)]
    watch.add(lambda: time.monotonic() > began[0] + 0.05, 1, "waited for kv1", lambda: time.monotonic() > began[0])
    assert until(lambda: not watch._under_way)
    assert not released
    watch.close()


def test_the_limit_begins_anew_after_a_pause() -> None:
    """A mutant would count from the first message ever."""
    _, released, watch = make(0.4)
    watch.add(lambda: True, 1, "waited for kv1")
    time.sleep(patient(0.8))
    done = threading.Event()
    watch.add(done.is_set, 1, "waited for kv1")
    time.sleep(patient(0.2))
    assert not released
    done.set()
    watch.close()


# ---------- what goes wrong in the thread


def test_a_question_that_fails_ends_no_watch(caplog: pytest.LogCaptureFixture) -> None:
    """As CUDA fails one for which another thread's capture is no time. Lost peers are found all the same."""
    _, released, watch = make(0.4)
    asked: list[int] = []

    def done() -> bool:
        asked.append(1)
        if len(asked) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return False

    watch.add(done, 1, "waited for kv1")
    assert until(lambda: len(asked) > 2)
    assert [each.getMessage() for each in caplog.records] == [
        "the watch over messages of rank 0 goes on after: operation not permitted when stream is capturing"
    ]
    assert until(lambda: bool(released)) and named(watch) == 1
    watch.close()


def test_a_release_that_fails_ends_no_watch() -> None:
    tried: list[int] = []

    def release() -> None:
        tried.append(1)
        if len(tried) == 1:
            raise RuntimeError("out of memory")

    control = FakeControl(patient(0.2))
    watch = Watch(control, release, end_process=control.ended.append)  # type: ignore[arg-type]
    watch.add(lambda: False, 1, "waited for kv1")
    assert until(lambda: len(tried) > 2) and named(watch) == 1
    watch.close()


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_begins_with_what_it_is_told(fails: bool) -> None:
    """In it, before anything is asked; it goes on where that fails."""
    calls: list[str] = []

    def begin() -> None:
        calls.append(threading.current_thread().name)
        if fails:
            raise OSError("libcuda.so.1: cannot open shared object file")

    def done() -> bool:
        calls.append("asked")
        return True

    watch = Watch(FakeControl(60.0), lambda: None, begin)  # type: ignore[arg-type]
    watch.add(done, 1, "waited for kv1")
    assert until(lambda: not watch._under_way)
    assert calls == ["tokenring watch", "asked"]
    watch.close()


def test_streams_that_do_not_go_on_end_the_process() -> None:
    """After another limit in vain, and with the reason."""
    control, released, watch = make(0.4)
    began = time.monotonic()
    watch.add(lambda: False, 1, "waited for kv1")
    assert until(lambda: bool(released)) and not control.ended
    assert until(lambda: bool(control.ended))
    assert time.monotonic() - began > 2 * control.timeout_seconds
    (text, *_) = control.ended
    assert re.search(r"rank 0 waited for kv1 from rank 1, which is lost, .* CUDA_DEVICE_MAX_CONNECTIONS=32", text)
    watch.close()


def test_a_device_that_answers_nothing_does_not_end_the_process() -> None:
    """What it raises comes to the host too, at its next call."""
    control, released, watch = make(0.2)

    def done() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    watch.add(done, 1, "waited for kv1")
    assert until(lambda: len(released) > 5) and not control.ended
    assert named(watch) == 1
    assert f"no end within {patient(0.2):g} s; an illegal memory access" in str(control.broken)
    watch.close()


def test_what_was_found_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Where no call came that could raise it."""
    _, released, watch = make(0.2)
    watch.add(lambda: False, 1, "waited for kv1")
    assert until(lambda: bool(released))
    watch.close()
    assert "its last results are not to be used: rank 1: waited for kv1" in caplog.text


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
    thread.join(patient(3.0))
    assert not thread.is_alive()
