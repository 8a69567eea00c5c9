"""What streams let happen, found on the CPU: every two uses of the same bytes, one of them a write, must have an order.

`Recorder` is a device with streams, and a transport whose messages are on their way until they are waited for. While a
program runs on it, every operator on tensors is written down with the bytes that it reads and writes. `races` then
goes through what was written down with a clock for each stream and each message: order comes from streams, events
and waits alone, so that what is only lucky counts as wrong. `drop` leaves out one record or wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenring.lowering.target import Target

UNIT_BYTES = 4
CPU = torch.device("cpu")
D = TypeVar("D", bound=Collection[int])
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Access:
    """Units of one storage that are read or written."""

    storage: int
    units: Indices
    writes: bool


@dataclass(frozen=True)
class Action:
    """use: of memory, by a thread (a stream or a message). fork: a message begins where a stream is now. record,
    wait: an event and a stream. join: a stream waits for all that another thread did until now. mark: nothing."""

    what: str
    thread: int
    other: int = -1  # the event, or the other thread
    accesses: tuple[Access, ...] = ()
    label: str = ""


class Stream:
    def __init__(self, recorder: Recorder, thread: int) -> None:
        self.recorder, self.thread = recorder, thread

    def wait_event(self, event: Event) -> None:
        self.recorder.log.append(Action("wait", self.thread, event.number))

    def wait_stream(self, other: Stream) -> None:
        self.recorder.log.append(Action("join", self.thread, other.thread))


class Event:
    def __init__(self, recorder: Recorder, number: int) -> None:
        self.recorder, self.number = recorder, number

    def record(self, stream: Stream) -> None:
        self.recorder.log.append(Action("record", stream.thread, self.number))


@dataclass
class Handle:
    """A message on its way, or several that are waited for together; group: their number, from 1 on."""

    recorder: Recorder
    threads: list[int]
    group: int = 0

    def wait(self) -> None:
        label = f"group {self.group}" if self.group else ""
        for thread in self.threads:
            self.recorder.log.append(Action("join", self.recorder.current.thread, thread, label=label))


@dataclass
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device, a transport, and what happens on them."""

    rank: int
    world_size: int
    one_sided: bool = False
    log: list[Action] = field(default_factory=list)
    threads: int = 0
    events: int = 0
    type: str = "recorded"

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target = Target(one_sided=self.one_sided)
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self._alive: dict[int, torch.UntypedStorage] = {}  # so that no address comes twice
        self.current: Stream = self.new_stream()

    # ---------- the device

    def current_stream(self) -> Stream:
        return self.current

    def new_stream(self, high_priority: bool = False) -> Stream:
        return Stream(self, self._new_thread())

    def new_event(self) -> Event:
        self.events += 1
        return Event(self, self.events - 1)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _new_thread(self) -> int:
        self.threads += 1
        return self.threads - 1

    # ---------- the transport

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Handle:
        return self._message(data, False, channel, f"send of {label}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Handle:
        return self._message(data, True, channel, f"receive of {label}")

    def _message(self, data: torch.Tensor, writes: bool, channel: str, label: str) -> Handle:
        return Handle(self, [self.begin_message(self.current, self._access(data, writes), label)])

    def begin_message(self, stream: Stream, access: Access, label: str) -> int:
        thread = self._new_thread()
        self.log.append(Action("fork", thread, stream.thread))
        self.log.append(Action("use", thread, accesses=(access,), label=label))
        return thread

    def fail(self, error: BaseException) -> None:
        raise error

    # ---------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not func.is_view:
            accesses = [*self._given(func, args, kwargs), *(self._access(x, True) for x in _tensors(made))]
            self.log.append(Action("use", self.current.thread, accesses=tuple(accesses), label=str(func)))
        return made

    def _given(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Access]:
        given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        for each in func._schema.arguments:
            writes = each.alias_info is not None and each.alias_info.is_write
            yield from (self._access(x, writes) for x in _tensors(given.get(each.name)))

    def _access(self, x: torch.Tensor, writes: bool) -> Access:
        storage = x.untyped_storage()
        key = storage.data_ptr()
        self._alive.setdefault(key, storage)
        places = np.full(1, x.storage_offset())
        for size, stride in zip(x.size(), x.stride(), strict=True):
            places = (places[:, None] + stride * np.arange(size)).reshape(-1)
        return Access(key, np.unique(places * x.element_size() // UNIT_BYTES), writes)

    def mark(self) -> None:
        self.log.append(Action("mark", 0))

    def use(self, x: torch.Tensor, label: str) -> None:
        """The current stream writes all of it."""
        self.log.append(Action("use", self.current.thread, accesses=(self._access(x, True),), label=label))


@dataclass
class GroupRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Its messages begin in groups, one for each channel, behind whatever stands in the channel's stream by then."""

    groups: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.target = replace(self.target, grouping=True)
        self._open: dict[str, tuple[Handle, Stream, list[tuple[Access, str]]]] = {}

    def _message(self, data: torch.Tensor, writes: bool, channel: str, label: str) -> Handle:
        if channel not in self._open:
            self.groups += 1
            self._open[channel] = Handle(self, [], self.groups), self.current, []
        handle, stream, posts = self._open[channel]
        assert stream is self.current
        posts.append((self._access(data, writes), label))
        return handle

    def go(self) -> None:
        for handle, stream, posts in self._open.values():
            handle.threads += [self.begin_message(stream, access, label) for access, label in posts]
        self._open.clear()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr()]


# ---------- what has no order


class _Shadow:
    """Of each unit of a storage: by whom and when it was last written, and last read by each thread."""

    def __init__(self) -> None:
        size = 1
        self.writer, self.written = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.read: dict[int, Indices] = {}

    def grow(self, size: int) -> None:
        more = size - len(self.writer)
        if more > 0:
            self.writer, self.written = (np.pad(x, (0, more)) for x in (self.writer, self.written))
            self.read = {thread: np.pad(x, (0, more)) for thread, x in self.read.items()}

    def copy(self) -> _Shadow:
        made = _Shadow()
        made.writer, made.written = self.writer.copy(), self.written.copy()
        made.read = {thread: x.copy() for thread, x in self.read.items()}
        return made

    def unordered(self, access: Access, clock: Indices) -> bool:
        """Whether something that conflicts with it is not known to have happened before."""
        units = access.units
        if (clock[self.writer[units]] < self.written[units]).any():
            return True
        return access.writes and any((x[units] > clock[thread]).any() for thread, x in self.read.items())

    def note(self, access: Access, thread: int, now: int) -> None:
        if access.writes:
            self.writer[access.units], self.written[access.units] = thread, now
        else:
            reads = self.read.setdefault(thread, np.zeros_like(self.written))
            reads[access.units] = now


def orders(log: Sequence[Action]) -> list[frozenset[int]]:
    """The places of all records and waits, together where one of them would do: see `_posts` for waits for events;
    the waits for one group."""
    waits, found = _posts(log), list[frozenset[int]]()
    groups: dict[str, set[int]] = defaultdict(set)
    latest: dict[int, int] = {}  # event → where it was recorded last
    for at, action in enumerate(log):
        if action.what == "record":
            latest[action.other] = at
        elif action.what == "join" and action.label:
            groups[action.label].add(at)
        elif action.what == "join":
            found.append(frozenset({at}))
        elif at in waits:
            found += [frozenset({latest[action.other]}), waits[at]]
    return [*dict.fromkeys(found), *map(frozenset, groups.values())]


def _posts(log: Sequence[Action]) -> dict[int, frozenset[int]]:
    """By the place of the last, the waits for events of a stream between two messages that begin there.

    Those of a group begin together, and the event that the last of them waits for is the latest: it would do alone.
    """
    found: dict[int, frozenset[int]] = {}
    open_waits: dict[int, list[int]] = defaultdict(list)  # thread → places
    for at, action in enumerate(log):
        if action.what == "wait":
            open_waits[action.thread].append(at)
        elif action.what == "fork" and (places := open_waits.pop(action.other, None)):
            found[places[-1]] = frozenset(places)
    return found


def behind_groups_again(log: Sequence[Action]) -> set[int]:
    """Records right behind a wait for a group that was waited for before, and waits for these: they may be idle.

    A program waits for every message of a group, and knows nothing of groups; the first such wait does for all.
    """
    first, again = dict[str, int](), set[str]()  # by group: where it was waited for first; those waited for again
    events, found = dict[int, bool](), set[int]()
    for at, action in enumerate(log):
        if action.what == "join" and action.label:
            start = first.setdefault(action.label, at)
            if any(each.what != "join" for each in log[start:at]):
                again.add(action.label)
        elif action.what == "record":
            events[action.other] = log[at - 1].what == "join" and log[at - 1].label in again
        if action.what in ("record", "wait") and events.get(action.other, False):
            found.add(at)
    return found


class Races:
    """What is used without an order, as far as it was gone through."""

    def __init__(self, threads: int) -> None:
        self.found: list[str] = []
        self._clocks: list[Indices] = [np.zeros(threads, np.int64) for _ in range(threads)]
        self._recorded: dict[int, Indices] = {}
        self._shadows: dict[int, _Shadow] = defaultdict(_Shadow)

    def copy(self) -> Races:
        """One that goes on from here by itself."""
        made = Races(0)
        made.found = list(self.found)
        made._clocks = [x.copy() for x in self._clocks]
        made._recorded = dict(self._recorded)  # these do not change
        made._shadows = defaultdict(_Shadow, {storage: each.copy() for storage, each in self._shadows.items()})
        return made

    def go_on(self, action: Action) -> None:
        clock = self._clocks[action.thread]
        if action.what == "use":
            clock[action.thread] += 1
            for access in action.accesses:
                shadow = self._shadows[access.storage]
                shadow.grow(int(access.units[-1]) + 1 if len(access.units) else 0)
                if shadow.unordered(access, clock):
                    self.found.append(f"{action.label} {'writes' if access.writes else 'reads'} too early")
            for access in action.accesses:
                self._shadows[access.storage].note(access, action.thread, int(clock[action.thread]))
        elif action.what == "record":
            self._recorded[action.other] = clock.copy()
        elif action.what == "wait":
            np.maximum(clock, self._recorded.get(action.other, clock), out=clock)  # one never recorded is none
        elif action.what in ("fork", "join"):  # the thread goes on behind the other one
            np.maximum(clock, self._clocks[action.other], out=clock)


def races(log: Sequence[Action], threads: int, drop: Collection[int] = ()) -> list[str]:
    """What is used without an order; without the actions at `drop`."""
    made = Races(threads)
    for at, action in enumerate(log):
        if at not in drop:
            made.go_on(action)
    return made.found


def without_races(log: Sequence[Action], threads: int, drops: Sequence[D]) -> list[D]:
    """Those of `drops` without which nothing is found: as by `races` for each, from where it differs to the first."""
    whole, gone, clean = Races(threads), 0, set[int]()
    for number, drop in sorted(enumerate(drops), key=lambda each: min(each[1])):
        for action in log[gone : min(drop)]:
            whole.go_on(action)
        gone = min(drop)
        if not whole.found and not _finds(whole.copy(), log, gone, drop):
            clean.add(number)
    return [drop for number, drop in enumerate(drops) if number in clean]


def _finds(made: Races, log: Sequence[Action], start: int, drop: Collection[int]) -> bool:
    for at in range(start, len(log)):
        if at not in drop:
            made.go_on(log[at])
            if made.found:
                return True
    return False


def only_shared(log: Sequence[Action]) -> list[Action]:
    """Without uses of memory that a single thread uses: quicker to go through, and nothing else is found."""
    users: dict[int, set[int]] = defaultdict(set)
    for action in log:
        for access in action.accesses:
            users[access.storage].add(action.thread)
    kept = []
    for action in log:
        shared = tuple(each for each in action.accesses if len(users[each.storage]) > 1)
        if action.what != "use" or shared:
            kept.append(Action(action.what, action.thread, action.other, shared, action.label))
    return kept
