"""Shared memory: one-sided puts between the ranks of one machine.

A receive is posted by writing where it should go into a ring of the pair and channel, which is the
sender's credit. The sender copies straight to that place, in the receiver's part of a heap that all
ranks map, and signals. Waits sleep. A send whose receive is not posted yet is put off to this
rank's next call of the transport, so that nothing ever blocks but a wait.
"""

from __future__ import annotations

import ctypes
import struct
from collections import defaultdict, deque
from typing import TYPE_CHECKING

import torch

from tokenring.backends.control.control import Control, Controlled, shared_segment
from tokenring.backends.control.failure_board import SLICE_SECONDS, ShmFailureBoard
from tokenring.backends.control.segments import SEMAPHORE_BYTES, Segment, Semaphore
from tokenring.backends.interfaces import Work
from tokenring.errors import BackendUnavailable, ConfigurationError
from tokenring.ir.schedule_data import CHANNELS
from tokenring.launch.groups import held
from tokenring.lowering.target import Target
from tokenring.weak_method import weakly

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

RING = 32  # receives of one pair and channel whose places can be known ahead; more wait here
ENTRY = struct.Struct("qqq")  # number of the heap, offset, size in bytes
LINE_BYTES = 2 * SEMAPHORE_BYTES + -(-RING * ENTRY.size // SEMAPHORE_BYTES) * SEMAPHORE_BYTES
LEAST_HEAP_BYTES, PAGE_BYTES = 1 << 16, 4096
SMALL_BYTES = 1 << 16  # up to which a plain copy takes less than torch's operators around one


class ShmLine:
    """One direction of a pair on one channel: its signals and its ring of places."""

    def __init__(self, segment: Segment, at: int) -> None:
        self.segment, self._ring_at = segment, at + 2 * SEMAPHORE_BYTES
        self.posted = Semaphore(segment.address + at)
        self.arrived = Semaphore(segment.address + at + SEMAPHORE_BYTES)

    def write(self, number: int, place: tuple[int, int, int]) -> None:
        """Write where message `number` goes into the ring: heap, offset and size in bytes."""
        self.segment.write(self._ring_at + number % RING * ENTRY.size, ENTRY.pack(*place))

    def read(self, number: int) -> tuple[int, int, int]:
        """Read where message `number` goes from the ring: heap, offset and size in bytes."""
        heap, offset, size = ENTRY.unpack(self.segment.read(self._ring_at + number % RING * ENTRY.size, ENTRY.size))
        return heap, offset, size


class Incoming:
    """The receives from one peer on one channel, in order."""

    def __init__(self, line: ShmLine, bell: Semaphore, own_bell: Semaphore) -> None:
        self.line, self._bell, self._own_bell = line, bell, own_bell
        self.asked = self.posted = self.arrived = 0
        self.waiting: deque[tuple[int, int, int]] = deque()  # places for which the ring has no room yet

    def ask(self, place: tuple[int, int, int]) -> int:
        """Post a receive into a place, and return its number."""
        self.asked += 1
        if self.waiting or self.posted - self.arrived >= RING:
            self.waiting.append(place)
        else:
            self._post(place)
        return self.asked

    def take_here(self, number: int) -> bool:
        """Take the numbered message if it has arrived, and nothing else is due before it."""
        if self.arrived == number - 1 and self.line.arrived.try_wait():
            self._taken()
        return self.arrived >= number

    def take(self, number: int, seconds: float) -> bool:
        """Wait up to so many seconds for the numbered message; return True once it has arrived."""
        while self.arrived < number:
            if not self.line.arrived.wait(seconds):
                return False
            self._taken()
        return True

    def _taken(self) -> None:
        self._own_bell.try_wait()  # it has rung for this
        self.arrived += 1
        if self.waiting:
            self._flush()

    def _flush(self) -> None:
        """Post what the ring has room for."""
        while self.waiting and self.posted - self.arrived < RING:
            self._post(self.waiting.popleft())

    def _post(self, place: tuple[int, int, int]) -> None:
        self.line.write(self.posted, place)
        self.posted += 1
        self.line.posted.post()
        self._bell.post()


class Outgoing:
    """The sends to one peer on one channel, in order."""

    def __init__(self, line: ShmLine, bell: Semaphore) -> None:
        self.line, self.bell = line, bell
        self.asked = self.put = 0
        self.waiting: deque[tuple[torch.Tensor, str]] = deque()


class ShmTransport(Controlled):
    """A transport over memory that the ranks of one machine share. `allocate` gives what it can receive into."""

    target = Target(one_sided=True)

    def __init__(self, group: Held, timeout_seconds: float) -> None:
        group = held(group)
        self.control = Control("shm", group, timeout_seconds, room_bytes, create_signals)
        self.rank, self.world_size = self.control.rank, self.control.world_size
        if self.control.shared is None:
            raise BackendUnavailable(
                f"transport 'shm' needs memory that all ranks share, but {self.control.why_not_shared}; "
                f"use transport='gloo' or 'auto'"
            )
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self._heaps: dict[int, tuple[Segment, int]] = {}  # number → memory and size of each rank's part
        self._made = 0
        self._connect(self.control.shared)
        self.control.progress = weakly(self.progress)  # while it waits in an exchange

    def _connect(self, board: ShmFailureBoard) -> None:
        """Find the lines and bells behind the board; rank 0 has made their semaphores."""
        segment, world = board.segment, self.world_size
        lines = _lines_at(world)
        bells = [Semaphore(segment.address + at) for at in _bells_at(world)]
        self._bell = bells[self.rank]
        self._incoming: dict[tuple[str, int], Incoming] = {}
        self._outgoing: dict[tuple[str, int], Outgoing] = {}
        for channel in CHANNELS:
            for peer in range(world):
                if peer != self.rank:
                    self._incoming[channel, peer] = Incoming(
                        ShmLine(segment, lines[channel, peer, self.rank]), bells[peer], self._bell
                    )
                    self._outgoing[channel, peer] = Outgoing(
                        ShmLine(segment, lines[channel, self.rank, peer]), bells[peer]
                    )
        self._put_off: list[Outgoing] = []

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Return this rank's part of a new heap, uint8; as large as the rank with the greatest need wants.

        None if all ranks' needs fit what was allocated last. A collective call; the heap before is
        given up. Raises BackendUnavailable, on all ranks, where /dev/shm has no room.
        """
        needs = [int.from_bytes(each, "little") for each in self.exchange(nbytes.to_bytes(8, "little"), "memory")]
        have = max((part for _, part in self._heaps.values()), default=0)
        if max(needs) <= have:
            return None
        trouble = ""
        for part in (_pages(max(*needs, have + have // 2)), _pages(max(needs))):  # some more, if there is room
            name = f"{self.control.name}-{self._made + 1}"
            segment, trouble = shared_segment(name, part * self.world_size, self.rank, self._agree, lambda *_: None)
            self._made += 1
            if segment is not None:
                self._heaps = {self._made: (segment, part)}
                return segment.part(self.rank * part, part)
        raise BackendUnavailable(f"transport 'shm' needs a larger heap, but {trouble}; use transport='gloo' or 'auto'")

    def _agree(self, what: str, trouble: str) -> list[str]:
        return [each.decode() for each in self.control.exchange_text(trouble.encode(), what)]

    # ---------- messages

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        """Post the send: copy to its place if the receiver has posted one, else later; see Transport.send."""
        self.control.check_usable()
        self.sent_bytes[dst] += data.nbytes
        out = self._outgoing[channel, dst]
        out.asked += 1
        out.waiting.append((data, label))
        if not self._push(out) and out not in self._put_off:
            self._put_off.append(out)
        return _Sent(self, out, out.asked, dst, label)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        """Post the receive: give the sender its place in the heap; see Transport.recv. Raises ConfigurationError."""
        self.control.check_usable()
        incoming = self._incoming[channel, src]
        return _Received(self, incoming, incoming.ask(self._place(data, label)), src, label)

    def close(self) -> None:
        """Give back all memory. Views that were given out keep theirs."""
        self.control.closed = True
        self._heaps.clear()
        self.pool = None

    def _place(self, data: torch.Tensor, label: str) -> tuple[int, int, int]:
        size = data.nbytes
        for number, (segment, part) in self._heaps.items():  # one, or none yet
            offset = data.data_ptr() - segment.address
            if self.rank * part <= offset and offset + size <= (self.rank + 1) * part:
                return number, offset, size
        raise ConfigurationError(f"receive of {label}: 'shm' receives only into memory from its own allocate()")

    def _push(self, out: Outgoing) -> bool:
        """Copy the sends that have a place to the peer; return True if none is left."""
        while out.waiting and out.line.posted.try_wait():
            self._bell.try_wait()  # it has rung for this
            heap, offset, size = out.line.read(out.put)
            data, label = out.waiting.popleft()
            self._put(data, heap, offset, size, label)
            out.put += 1
            out.line.arrived.post()
            out.bell.post()
        return not out.waiting

    def _put(self, data: torch.Tensor, heap: int, offset: int, size: int, label: str) -> None:
        mine = data.nbytes
        if size != mine or heap not in self._heaps:
            raise ConfigurationError(
                f"send of {label}: rank {self.rank} sends {mine} bytes, its peer expects {size} in heap {heap}: "
                f"the ranks run different programs"
            )
        segment = self._heaps[heap][0]
        if size <= SMALL_BYTES:
            ctypes.memmove(segment.address + offset, data.data_ptr(), size)
        else:
            segment.bytes[offset : offset + size].copy_(data.view(-1).view(torch.uint8))

    # ---------- waiting

    def progress(self) -> bool:
        """Copy the sends that were put off and have a place now; return True if some are left."""
        if self._put_off:
            self._put_off = [out for out in self._put_off if not self._push(out)]
        return bool(self._put_off)

    def has_received(self, incoming: Incoming, number: int) -> bool:
        """Take the numbered message without waiting, if it is here and nothing else is to be done; else False."""
        return not self._put_off and incoming.take_here(number)

    def wait_received(self, incoming: Incoming, number: int, src: int, label: str) -> None:
        """Wait until the numbered receive has arrived. Raises PeerLost."""

        def attempt(seconds: float) -> bool:
            busy = self.progress()
            if incoming.take(number, 0.0 if busy else seconds):
                return True
            if busy and seconds:
                self._sleep(seconds)
            return False

        self.control.wait(attempt, src, f"waited for {label}")

    def wait_sent(self, out: Outgoing, number: int, dst: int, label: str) -> None:
        """Wait until the numbered send has been copied to the peer. Raises PeerLost."""

        def attempt(seconds: float) -> bool:
            self.progress()
            if out.put < number and seconds:
                self._sleep(seconds)
                self.progress()
            return out.put >= number

        self.control.wait(attempt, dst, f"waited to send {label}")

    def _sleep(self, seconds: float) -> None:
        """Sleep until anything happens for this rank, up to so many seconds.

        Whoever rings has done before what it rings for.
        """
        if self._bell.wait(min(seconds, SLICE_SECONDS)):
            while self._bell.try_wait():
                pass


class _Sent:
    def __init__(self, transport: ShmTransport, out: Outgoing, number: int, dst: int, label: str) -> None:
        self._wait = transport, out, number, dst, label

    def wait(self) -> None:
        """Wait until the bytes are at the peer; see Work.wait."""
        transport, out, number, dst, label = self._wait
        if out.put < number:
            transport.wait_sent(out, number, dst, label)


class _Received:
    def __init__(self, transport: ShmTransport, incoming: Incoming, number: int, src: int, label: str) -> None:
        self._wait = transport, incoming, number, src, label

    def wait(self) -> None:
        """Wait until the bytes are here; see Work.wait."""
        transport, incoming, number, src, label = self._wait
        if not transport.has_received(incoming, number):
            transport.wait_received(incoming, number, src, label)


def _pages(nbytes: int) -> int:
    """Round so many bytes up to whole pages, and to the least heap."""
    return max(LEAST_HEAP_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)


def room_bytes(world_size: int) -> int:
    """Return the shared memory, in bytes, for the signals of so many ranks."""
    return len(CHANNELS) * world_size**2 * LINE_BYTES + world_size * SEMAPHORE_BYTES


def _lines_at(world_size: int) -> dict[tuple[str, int, int], int]:
    """Return the offset, in bytes, at which the line of each channel, source and destination begins."""
    keys = [(c, src, dst) for c in CHANNELS for src in range(world_size) for dst in range(world_size)]
    start = ShmFailureBoard.size_bytes(world_size)
    return {key: start + index * LINE_BYTES for index, key in enumerate(keys)}


def _bells_at(world_size: int) -> list[int]:
    start = ShmFailureBoard.size_bytes(world_size) + len(CHANNELS) * world_size**2 * LINE_BYTES
    return [start + rank * SEMAPHORE_BYTES for rank in range(world_size)]


def create_signals(segment: Segment, world_size: int) -> None:
    """Set up the semaphores of all lines and bells; by one rank."""
    for at in _lines_at(world_size).values():
        for semaphore in range(2):
            Semaphore(segment.address + at + semaphore * SEMAPHORE_BYTES).create()
    for at in _bells_at(world_size):
        Semaphore(segment.address + at).create()
