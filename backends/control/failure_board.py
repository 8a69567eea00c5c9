"""Boards, on which the ranks of a group see each other's state outside of all messages.

On one machine it is shared memory, between machines the group's store. A board holds, for each
rank, for whom it waits; and one verdict for the group: which rank is lost. The first verdict stays.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from tokenring.backends.control.segments import SEMAPHORE_BYTES, Segment, Semaphore
from tokenring.backends.control.store_gather import StoreSilent, bounded

SLICE_SECONDS = 0.1  # how long a wait sleeps before it looks whether the peer still lives
CELL_BYTES = SEMAPHORE_BYTES - 4  # what a rank may say at once, after the number of the exchange
VERDICT_BYTES = 1024
NOBODY = -1
ROUNDS = 1 << 31  # even: exchanges take turns between two rows


@dataclass(frozen=True)
class FailureReport:
    """A report that rank `rank` is lost, by rank `by`. `certain`: dead, stopped or failed; else only silent."""

    rank: int
    why: str
    by: int
    certain: bool

    def to_bytes(self, room_bytes: int | None = None) -> bytes:
        """Return the report as JSON; `why` is cut until the text fits into room_bytes."""
        text = json.dumps(asdict(self), ensure_ascii=False).encode(errors="replace")
        if room_bytes is None or len(text) <= room_bytes:
            return text
        return replace(self, why=f"{self.why[: len(self.why) * 3 // 4 - 2]} …").to_bytes(room_bytes)

    @staticmethod
    def from_bytes(data: bytes) -> FailureReport:
        """Make the report from JSON; see to_bytes."""
        return FailureReport(**json.loads(data))


class FailureBoard(Protocol):
    """A board on which the ranks of a group report their own state."""

    def verdict(self) -> FailureReport | None:
        """Return the group's verdict, or None if there is none yet."""

    def claim(self, verdict: FailureReport) -> FailureReport:
        """Make it the group's verdict, or get the one that was first; return the verdict that stands."""

    def waits(self, rank: int) -> int | None:
        """Return the rank that a rank is known to wait for, or None."""

    def note_waiting(self, peer: int | None) -> None:
        """Note for whom this rank waits, where that is cheap; None: for nobody."""

    def publish_waiting(self, peer: int) -> None:
        """Publish for whom this rank waits, in any case: the wait was in vain."""


class ShmFailureBoard:
    """A board in shared memory; also small exchanges between all ranks, and room for a transport's signals.

    In the segment, in cells of SEMAPHORE_BYTES: the board's name, a lock and a flag for the verdict, the
    verdict, for whom each rank waits, two rows of exchanged payloads by rank, tickets, and a gate and
    a fence for each rank; then what the transport wants.

    An exchange: each rank writes its payload and takes a ticket. There is one ticket less than ranks:
    who gets none is last, puts the tickets back and opens the gates, so that nobody sleeps twice.
    """

    def __init__(self, segment: Segment, rank: int, world_size: int) -> None:
        self.segment, self.rank, self.world_size = segment, rank, world_size
        cells = iter(range(0, segment.bytes.numel(), SEMAPHORE_BYTES))
        next(cells)  # the name
        self._lock, self._ready = self._semaphore(next(cells)), self._semaphore(next(cells))
        self._verdict_at = next(cells)
        for _ in range(VERDICT_BYTES // SEMAPHORE_BYTES - 1):
            next(cells)
        self._waits_at = [next(cells) for _ in range(world_size)]
        self._payloads_at = [[next(cells) for _ in range(world_size)] for _ in range(2)]
        self._tickets = self._semaphore(next(cells))
        self._gates = [self._semaphore(next(cells)) for _ in range(world_size)]
        fences = [self._semaphore(next(cells)) for _ in range(world_size)]
        self._fence = fences[rank]
        self._all = [self._lock, self._ready, self._tickets, *self._gates, *fences]
        self._round = 0
        self._found: FailureReport | None = None

    @staticmethod
    def size_bytes(world_size: int) -> int:
        """Return the shared memory, in bytes, that the board of so many ranks takes."""
        return SEMAPHORE_BYTES * (4 + VERDICT_BYTES // SEMAPHORE_BYTES + 5 * world_size)

    def create(self, name: str) -> None:
        """Set up a new segment; by one rank."""
        self.segment.write(0, name.encode()[:SEMAPHORE_BYTES])
        for semaphore in self._all:
            semaphore.create()
        self._lock.post()
        for _ in range(self.world_size - 1):
            self._tickets.post()
        for at in self._waits_at:
            self.segment.write(at, struct.pack("i", NOBODY))

    def is_called(self, name: str) -> bool:
        """Return True if this is the very memory that the rank which created it wrote the name into."""
        return self.segment.read(0, SEMAPHORE_BYTES).rstrip(b"\0") == name.encode()[:SEMAPHORE_BYTES]

    def verdict(self) -> FailureReport | None:
        """Return the group's verdict, or None; see FailureBoard.verdict."""
        if self._found is None and self._ready.try_wait():
            self._ready.post()
            text = self.segment.read(self._verdict_at, VERDICT_BYTES).rstrip(b"\0")
            self._found = FailureReport.from_bytes(text)
        return self._found

    def claim(self, verdict: FailureReport) -> FailureReport:
        """Propose a verdict, and return the one that stands; see FailureBoard.claim."""
        if self._lock.try_wait():
            self.segment.write(self._verdict_at, verdict.to_bytes(VERDICT_BYTES))
            self._ready.post()
        deadline = time.monotonic() + 1.0
        while (first := self.verdict()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return first or verdict  # who claimed it died before it could say what

    def waits(self, rank: int) -> int | None:
        """Return the rank that a rank waits for; see FailureBoard.waits."""
        (peer,) = struct.unpack("i", self.segment.read(self._waits_at[rank], 4))
        return None if peer == NOBODY else peer

    def note_waiting(self, peer: int | None) -> None:
        """Note the rank that this one waits for; see FailureBoard.note_waiting."""
        self.segment.write(self._waits_at[self.rank], struct.pack("i", NOBODY if peer is None else peer))

    def publish_waiting(self, peer: int) -> None:
        """Note the rank that this one waits for: shared memory is seen by all at once."""
        self.note_waiting(peer)

    def say(self, payload: bytes) -> None:
        """Begin an exchange: write this rank's payload. `heard` and `hear` are the second half."""
        # Nobody is two rounds ahead: it has heard everyone in the last.
        self._round = (self._round + 1) % ROUNDS
        at = self._payloads_at[self._round % 2][self.rank]
        self.segment.write(at, struct.pack("i", self._round) + payload)
        self._fence.post()  # taking a ticket alone would not release what was written, on every processor
        last = not self._tickets.try_wait()
        self._fence.try_wait()
        if last:
            for _ in range(self.world_size - 1):
                self._tickets.post()
            for gate in self._gates:
                gate.post()

    def heard(self, seconds: float) -> bool:
        """Wait up to so many seconds until all ranks have spoken; return True once in each round."""
        return self._gates[self.rank].wait(seconds)

    def missing(self) -> int | None:
        """Return the first rank that has not spoken in this round, or None."""
        row = self._payloads_at[self._round % 2]
        spoken = [struct.unpack("i", self.segment.read(at, 4))[0] for at in row]
        return next((rank for rank, number in enumerate(spoken) if number != self._round), None)

    def hear(self) -> list[bytes]:
        """Return what all ranks said, by rank, once `heard` has returned True."""
        row = self._payloads_at[self._round % 2]
        cells = self.segment.read(row[0], len(row) * SEMAPHORE_BYTES)
        return [cells[at + 4 : at + SEMAPHORE_BYTES] for at in range(0, len(cells), SEMAPHORE_BYTES)]

    def _semaphore(self, at: int) -> Semaphore:
        return Semaphore(self.segment.address + at)


class StoreFailureBoard:
    """A board at the group's store. Asked only when something is wrong."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.silent = False

    def verdict(self) -> FailureReport | None:
        """Return the group's verdict, or None; see FailureBoard.verdict."""
        text = self._read("lost")
        return FailureReport.from_bytes(text) if text else None

    def claim(self, verdict: FailureReport) -> FailureReport:
        """Propose a verdict, and return the one that stands; see FailureBoard.claim."""
        mine = verdict.to_bytes().decode()
        first = self._bounded(lambda: self.store.compare_set("lost", "", mine))
        return FailureReport.from_bytes(first) if first else verdict

    def waits(self, rank: int) -> int | None:
        """Return the rank that a rank has published to wait for; see FailureBoard.waits."""
        text = self._read(f"waits/{rank}")
        return int(text) if text else None

    def note_waiting(self, peer: int | None) -> None:
        """Do nothing: this is not worth a message to the store."""

    def publish_waiting(self, peer: int) -> None:
        """Write to the store which rank this one waits for; see FailureBoard.publish_waiting."""
        self._bounded(lambda: self.store.set(f"waits/{self.rank}", str(peer)))

    def _read(self, key: str) -> bytes | None:
        found: bytes | None = self._bounded(lambda: self.store.get(key) if self.store.check([key]) else None)
        return found

    def _bounded(self, function: Any) -> Any:
        if self.silent:
            return None
        try:
            return bounded(function, 0.5)
        except StoreSilent:
            self.silent = True
            return None
