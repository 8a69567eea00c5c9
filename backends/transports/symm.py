"""Symmetric memory: one-sided puts between accelerators whose memory their peers can reach.

The protocol is that of `onesided`; here are the places of messages and the life of the memory. The ranks tell each
other where each message of a program goes when they bind it, so that a sender can queue its puts without hearing of
the receiver's host again: the receiver's credit comes over the device. docs/cuda-transports.md has the reasons.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch

from tokenring.backends.control.control import Control, own_store
from tokenring.backends.control.dissemination import Apart
from tokenring.backends.control.joint_steps import Acting
from tokenring.backends.control.watch import Watch, Watched
from tokenring.backends.devices import DeviceRuntime, device_of
from tokenring.backends.interfaces import Landing, Work
from tokenring.backends.transports import driver
from tokenring.backends.transports import memory_trial as trial
from tokenring.backends.transports.accelerated import check_movable, elsewhere
from tokenring.backends.transports.onesided import Line, OwnMemory, Receiving, Sending, Words
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.ir.schedule_data import CHANNELS
from tokenring.launch.groups import held
from tokenring.lowering.mailboxes import Mailboxes, lay
from tokenring.lowering.target import Link, Target

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

T = TypeVar("T")
NOT_CAPTURED = (
    "messages of transport {!r} cannot be captured in a graph here, {} fails on {}: call attention without a capture"
)
LEAST_HEAP_BYTES = 2 << 20  # what the driver maps at a time
Places = dict[Line, list[tuple[int, int]]]  # offset and size in bytes of each message, in order


@runtime_checkable
class Mailing(OwnMemory, Protocol):
    """A memory whose puts reach boxes beside the heap: their places are offsets there."""

    def lay(self, nbytes: int) -> None:
        """Make so many bytes for boxes, instead of those before. All ranks call it together, with nothing under way."""

    def take(self, data: torch.Tensor, place: int) -> None:
        """Queue the copy of a message out of an own box to where it belongs."""


@dataclass(frozen=True)
class Placement:
    """The places of one bound program's messages: those that this rank receives, and those that it sends.

    boxes: of each line that it receives on, the boxes that messages come in, in turn; none where they need none.
    """

    heap: int
    own: Places
    theirs: Places
    boxes: dict[Line, tuple[int, ...]]

    def box(self, line: Line, number: int) -> int | None:
        """Return the box that a message of this number comes in; None where it needs none."""
        boxes = self.boxes.get(line)
        return None if boxes is None else boxes[number % len(boxes)]


class SymmTransport(Watched, Acting):
    """A transport over symmetric memory, from `allocate`, between the ranks of a group. Programs are `placed`."""

    name = "symm"
    device_type = "cuda"
    target = Target(early_receives=False, one_sided=True, placing=True, capturable=True)

    def __init__(self, group: Held, timeout_seconds: float) -> None:
        group = held(group)
        self.control = Control(self.name, group, timeout_seconds)
        self.rank, self.world_size = self.control.rank, self.control.world_size
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self._apart = Apart.where_needed(self.control, group)
        self._words = Words(CHANNELS, self.world_size)
        self._heap = torch.empty(0, dtype=torch.uint8)
        self._heaps = 0  # how many there were
        self._box_bytes = 0
        self._placement: Placement | None = None
        self._captured = False  # whether signals and waits were seen to work in a graph
        self._counts: dict[tuple[bool, Line], int] = defaultdict(int)  # messages of this pass, sent or received
        self._where: torch.device | None = None  # the device, where it has a number
        try:
            self.device: DeviceRuntime = self._together("its device", self._find_device, here=True)
            store = self._meeting_place(group)
            self._memory = self._together("symmetric memory", lambda: self._make_memory(store))
            size = trial.room_bytes(self.world_size)
            room = self._together("the rendezvous", lambda: self._memory.meet(self._words.count, size))
            self._try_verbs(room)
        except BaseException:
            self.close()
            raise
        begin = driver.stay_out_of_captures if self.device_type == "cuda" else None
        self._watch = Watch(self.control, self._memory.release, begin)
        self._sending: dict[Line, Sending] = {}
        self._receiving: dict[Line, Receiving] = {}
        for line in [(channel, peer) for channel in CHANNELS for peer in range(self.world_size) if peer != self.rank]:
            self._sending[line] = Sending(self._memory, self.device, self._words, self.rank, line)
            self._receiving[line] = Receiving(self._memory, self.device, self._words, self.rank, line)

    # ---------- set-up

    def _find_device(self) -> DeviceRuntime:
        """Return the device that this rank computes on. Raises RuntimeError if it has none that serves."""
        from tokenring.backends.transports.symmetric import unavailable

        if reason := unavailable():
            raise RuntimeError(reason)
        self._where = torch.device("cuda", torch.cuda.current_device())
        return device_of(self._where)

    def _meeting_place(self, group: Held) -> Any:
        """Return a store for the rendezvous alone: a rank that waits there in vain must hold up nothing else."""
        store = own_store(self.control, group, "symmetric memory").clone()
        store.set_timeout(timedelta(seconds=self.control.timeout_seconds / 3))
        return store

    def _make_memory(self, store: Any) -> OwnMemory:
        from tokenring.backends.transports.symmetric import SymmetricMemory

        assert self._where is not None
        return SymmetricMemory(f"tokenring {self.control.name}", self.rank, self.world_size, store, self._where)

    def _try_verbs(self, room: torch.Tensor) -> None:
        """Try each verb between every two ranks, before anything relies on them. Raises trial.Broken, on all ranks."""
        self._together("a trial of puts, signals and waits", self._trial(room).run, raises=trial.Broken)

    def _trial(self, room: torch.Tensor) -> trial.Trial:
        """Make this rank's part of a trial; room: where its peers put."""
        memory, seconds = self._memory, min(trial.SECONDS, self.control.timeout_seconds / 3)

        def copy_out(data: torch.Tensor, place: int) -> None:
            data.copy_(room[place : place + data.numel()])

        take = memory.take if isinstance(memory, Mailing) else copy_out
        return trial.Trial(memory, self.device, self._words, self.rank, self.world_size, take, room.device, seconds)

    def try_capture(self) -> None:
        """Try once, on all ranks together, that a graph of the device signals and waits, before the first capture.

        Raises UnsupportedError, on all ranks, where it does not; where it was launched already, the group is broken.
        """
        self.check()
        if self._captured or self.world_size == 1:
            return
        own, what = self._trial(torch.empty(0)), "a captured signal and wait"

        def together(what: str, act: Callable[[], T]) -> T:
            return self._together(what, act, raises=trial.Broken, text=NOT_CAPTURED)

        try:
            together("the end of what is under way", self.device.synchronize)  # words are clear
            graph = together(what, own.captured)
        except trial.Broken as error:
            raise UnsupportedError(str(error)) from None
        try:
            together(f"the launch of {what}", lambda: own.launch(graph))
            together(f"the end of {what}", own.check_clear)
        except trial.Broken as error:
            self.fail(error)
            raise UnsupportedError(str(error)) from None
        self._captured = True

    def prepare(self, links: Iterable[Link], device: torch.device) -> None:
        """Check the device. All ranks are connected from the start. Raises ConfigurationError for tensors elsewhere."""
        self.check()
        another = self._where is not None and device.index not in (None, self._where.index)
        if device.type != self.device_type or another:
            how = "make it when that device is the current one, or "
            raise elsewhere(self.name, str(self._where or self.device_type), device, how)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Return this rank's part of a new heap, uint8; None if all ranks' needs fit the last one.

        A collective call. Raises BackendUnavailable, on all ranks, where a device has no room for it.
        """
        self.check()
        needs = [int.from_bytes(each, "little") for each in self.exchange(nbytes.to_bytes(8, "little"), "memory")]
        if max(needs) <= self._heap.numel():
            return None
        part = -(-max(*needs, LEAST_HEAP_BYTES) // LEAST_HEAP_BYTES) * LEAST_HEAP_BYTES
        self._together("the end of what is under way", self.device.synchronize)  # peers may still put into the old one
        self._placement, self._heap = None, torch.empty(0, dtype=torch.uint8)
        self._heap = self._together(f"a heap of {part} bytes", lambda: self._memory.grow(part))
        self._heaps += 1
        return self._heap

    def place(self, receives: Sequence[Landing]) -> Placement:
        """Send the others the places of a program's messages, and receive theirs. A collective call."""
        own: Places = defaultdict(list)
        for src, channel, data in receives:
            own[channel, src].append(self._place_of(data, f"from rank {src}"))
        text = json.dumps([[channel, src, places] for (channel, src), places in own.items()])
        said = self.exchange_text(zlib.compress(text.encode()), "places")
        lines: dict[Link, list[tuple[int, int]]] = {
            (src, peer, channel): [(int(at), int(size)) for at, size in places]
            for peer, each in enumerate(said)
            for channel, src, places in json.loads(zlib.decompress(each))
        }
        boxes = self._lay(lines)
        if boxes is not None:  # which is where senders put
            lines = {
                link: [(boxes.place(link, number), size) for number, (_, size) in enumerate(places)]
                for link, places in lines.items()
            }
        theirs = {(channel, dst): places for (src, dst, channel), places in lines.items() if src == self.rank}
        mine = {} if boxes is None else {(channel, src): boxes.places[src, self.rank, channel] for channel, src in own}
        return Placement(self._heaps, dict(own), theirs, mine)

    def _lay(self, lines: dict[Link, list[tuple[int, int]]]) -> Mailboxes | None:
        """Lay boxes for all messages of a program, the same on all ranks, in memory with room; None: it needs none."""
        memory = self._memory
        if not isinstance(memory, Mailing):
            return None
        made = lay({link: [size for _, size in places] for link, places in lines.items()})
        if made.nbytes > self._box_bytes:
            self._together("the end of what is under way", self.device.synchronize)  # peers may still put into the old
            self._together(f"boxes of {made.nbytes} bytes", lambda: memory.lay(made.nbytes))
            self._box_bytes = made.nbytes
        return made

    def begin(self, placement: Placement) -> None:
        """Begin this program's messages, on streams behind all before. Raises ConfigurationError if the heap grew."""
        if placement.heap != self._heaps:
            raise ConfigurationError(
                f"transport {self.name!r}: this program was bound before the memory grew; bind it again"
            )
        self._placement = placement
        self._counts.clear()
        for line in placement.own:
            boxes = placement.boxes.get(line)
            self._receiving[line].begin(None if boxes is None else len(boxes))

    # ---------- messages

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        """Post the send to the message's place; see Transport.send. Raises ConfigurationError, PeerLost."""
        self.check()
        mover = f"transport {self.name!r}"
        check_movable(data, self.device_type, f"send of {label}", self.rank, mover, self.device_type)
        nbytes = data.numel() * data.element_size()
        place, size = self._next(False, (channel, dst), f"send of {label}")
        if size != nbytes:
            raise ConfigurationError(
                f"send of {label}: rank {self.rank} sends {nbytes} bytes, rank {dst} expects {size}: "
                f"the ranks run different programs"
            )
        self.sent_bytes[dst] += nbytes
        with self.watched(dst, f"waited to send {label}") as end:
            end.begun, end.done = self._sending[channel, dst].send(data, place)
        return _Sent(self, end.done, data)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        """Post the receive at the message's place; see Transport.recv. Raises ConfigurationError, PeerLost."""
        self.check()
        placement, number = self._placement, self._counts[True, (channel, src)]
        told = self._next(True, (channel, src), f"receive of {label}")
        if told != self._place_of(data, label):
            raise ConfigurationError(f"receive of {label}: rank {src} was told another place than this for it")
        box = None if placement is None else placement.box((channel, src), number)
        return self._post(data, (channel, src), box, label)

    def _post(self, data: torch.Tensor, line: Line, box: int | None, label: str) -> Work:
        """Signal the credit for a message to its place, or into a box. A wait that the post needs is watched, too."""
        end, memory, src = self._receiving[line], self._memory, line[1]
        take = partial(memory.take, data, box) if box is not None and isinstance(memory, Mailing) else None
        if not end.is_full:
            return _Received(self, end, end.post(take), src, label)
        with self.watched(src, f"waited before {label} for what comes first") as ahead:
            ahead.begun = self.device.current_stream().record_event()
            number = end.post(take)
            ahead.done = self.device.current_stream().record_event()
        return _Received(self, end, number, src, label)

    def _next(self, received: bool, line: Line, what: str) -> tuple[int, int]:
        """Return the place and size of the next message of a line. Raises ConfigurationError if there is none."""
        placement = self._placement
        places = [] if placement is None else (placement.own if received else placement.theirs).get(line, [])
        number = self._counts[received, line]
        if number >= len(places):
            raise ConfigurationError(
                f"{what}: message {number} with rank {line[1]} on {line[0]} has no place: transport {self.name!r} "
                f"moves the messages of a program that all ranks have bound, {len(places)} here"
            )
        self._counts[received, line] = number + 1
        return places[number]

    def _place_of(self, data: torch.Tensor, label: str) -> tuple[int, int]:
        size = data.numel() * data.element_size()
        offset = data.data_ptr() - self._heap.data_ptr() if self._heap.numel() else -1
        if offset < 0 or offset + size > self._heap.numel():
            raise ConfigurationError(f"receive of {label}: {self.name!r} receives only into memory of its allocate()")
        return offset, size

    def watched(self, peer: int, what: str) -> End:
        """Return a message's end, which the watch looks after; set its events inside of its `with`, once queued."""
        end = End()
        if not self._is_captured():
            self._watch.add(end.is_reached, peer, what, end.is_begun)
        return end

    def _is_captured(self) -> bool:
        """Return True if calls go into a graph, whose replays are not watched."""
        return self.device_type == "cuda" and torch.cuda.is_current_stream_capturing()

    # ---------- errors, end

    def close(self) -> None:
        """Give back the memory, once nothing is under way on any device that reaches it."""
        if self.control.closed:
            return
        try:
            if self.control.broken is None and self._heaps:
                self.device.synchronize()
        finally:
            self.control.closed = True
            if hasattr(self, "_watch"):
                self._watch.close()
            self._heap, self.pool, self._placement = torch.empty(0, dtype=torch.uint8), None, None
            for each in ("_memory", "_sending", "_receiving", "_watch"):  # which hold the memory
                self.__dict__.pop(each, None)
            self._apart = None


class End:
    """The wait of this rank's device for a message, and its end; inside of `with`, until that is queued."""

    begun: Any = None
    done: Any = None
    _failed = False

    def __enter__(self) -> End:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._failed = kind is not None  # nothing is queued that could end

    def is_begun(self) -> bool:
        """Return True once the device has come to where it waits."""
        return self.begun is not None and bool(self.begun.query())

    def is_reached(self) -> bool:
        """Return True once the wait has ended, or if it could not be queued."""
        return self._failed or (self.done is not None and bool(self.done.query()))


class _Sent:
    """A send under way. The tensor lives until the stream that reads it is waited for."""

    def __init__(self, transport: SymmTransport, done: Any, data: torch.Tensor) -> None:
        self._transport, self._done, self._data = transport, done, data

    def wait(self) -> None:
        """Let the current stream wait until the bytes are put; see Work.wait. Raises PeerLost."""
        self._transport.device.current_stream().wait_event(self._done)
        self._transport.check()


class _Received:
    def __init__(self, transport: SymmTransport, line: Receiving, number: int, src: int, label: str) -> None:
        self._transport, self._line, self._number, self._src, self._label = transport, line, number, src, label

    def wait(self) -> None:
        """Let the current stream wait until the message has arrived; see Work.wait. Raises PeerLost."""
        transport = self._transport
        transport.check()
        with transport.watched(self._src, f"waited for {self._label}") as end:
            end.begun = transport.device.current_stream().record_event()
            end.done = self._line.wait(self._number)
        transport.check()
