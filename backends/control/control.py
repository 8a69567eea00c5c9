"""The control of a group, beside its messages: who the ranks are, small exchanges between all, and whom to blame.

A lost peer is named in three ways, the surest first: a process that this rank can see to be gone or
stopped, along the chain of who waits for whom; a verdict that another rank has reached before; and
else the rank at the end of the chain, which waits for nobody and says nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore

from tokenring.backends.control.failure_board import (
    CELL_BYTES,
    SLICE_SECONDS,
    FailureBoard,
    FailureReport,
    ShmFailureBoard,
    StoreFailureBoard,
)
from tokenring.backends.control.process_info import ProcessInfo, this_process
from tokenring.backends.control.segments import Segment, no_semaphores
from tokenring.backends.control.store_gather import StoreGather
from tokenring.backends.interfaces import Transport
from tokenring.errors import ConfigurationError, PeerLost
from tokenring.launch.groups import held

if TYPE_CHECKING:
    import torch

    from tokenring.launch.groups import Held
    from tokenring.lowering.target import Link

TAG_BYTES = 4  # of an exchange: what it is about
PAYLOAD_BYTES = CELL_BYTES - TAG_BYTES - 1
MAY_WAIT = "may itself only wait for the one that is lost"
PROMPT_SECONDS = 0.002
GRACE_SECONDS = 1.2  # for others to say for whom they waited, before a silent rank is named
ENLARGE = " (enlarge it; docker: --shm-size)"
LOG = logging.getLogger("tokenring")
Gather = Callable[[bytes], Callable[[], list[bytes]]]  # what this rank says → waits for what all say


class Control:
    """One group's control, made by all ranks together. Raises PeerLost if a rank does not come."""

    def __init__(
        self,
        transport: str,
        group: Held,
        timeout_seconds: float,
        room_bytes: Callable[[int], int] = lambda world_size: 0,
        create_room: Callable[[Segment, int], None] = lambda segment, world_size: None,
    ) -> None:
        """Make the control of the transport `transport`, a name that all ranks must share.

        room_bytes: given the world size, the bytes of shared memory that the transport needs for its signals.
        create_room: called on one rank, sets these signals up.
        """
        self.transport, self.timeout_seconds, self._create_room = transport, timeout_seconds, create_room
        meeting = StoreGather(group, timeout_seconds)
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self.name = ""
        self.members = self._introduce(meeting, transport)
        self.shared, self.why_not_shared = self._share(meeting, room_bytes(self.world_size))
        self.board: FailureBoard = self.shared or StoreFailureBoard(meeting.store, self.rank, self.world_size)
        # How a transport exchanges where memory is not shared: short payloads; and texts, of which all know the sizes.
        self.gather_apart: Gather | None = None
        self.texts_apart: Callable[[bytes, Sequence[int]], list[bytes]] | None = None
        self.broken: PeerLost | None = None
        self.closed = False
        self.progress: Callable[[], object] = lambda: None  # what a transport has to do while its rank waits

    # ---------- meeting

    def _introduce(self, meeting: StoreGather, transport: str) -> list[ProcessInfo]:
        mine = {"name": uuid.uuid4().hex, "transport": transport, "member": this_process().to_text()}
        said = [json.loads(text) for text in meeting.gather("who they are", json.dumps(mine))]
        if len({each["transport"] for each in said}) > 1:
            found = ", ".join(f"rank {rank} {each['transport']!r}" for rank, each in enumerate(said))
            raise ConfigurationError(f"the ranks disagree on the transport: {found}. Give all ranks the same one")
        self.name = said[0]["name"]
        return [ProcessInfo.from_text(each["member"]) for each in said]

    def _share(self, meeting: StoreGather, room_bytes: int) -> tuple[ShmFailureBoard | None, str]:
        """Return the board in shared memory and "", or None and why there is none; all ranks agree."""
        mine = self.members[self.rank]
        apart = next((rank for rank, each in enumerate(self.members) if not each.shares_memory_with(mine)), None)
        if apart is not None:
            return None, f"rank {apart} is on another machine or in another network namespace than rank {self.rank}"
        if reason := no_semaphores():
            return None, reason
        size = ShmFailureBoard.size_bytes(self.world_size)
        segment, reasons = shared_segment(self.name, size + room_bytes, self.rank, meeting.gather, self._init)
        return (ShmFailureBoard(segment, self.rank, self.world_size) if segment else None), reasons

    def _init(self, segment: Segment, creates: bool) -> None:
        board = ShmFailureBoard(segment, self.rank, self.world_size)
        if creates:
            board.create(self.name)
            self._create_room(segment, self.world_size)
        elif not board.is_called(self.name):
            raise OSError("it is not the memory that rank 0 has: /dev/shm is not the same for all ranks")

    # ---------- exchange

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Return what every rank says about `what`, by rank; up to PAYLOAD_BYTES each.

        Raises PeerLost; ConfigurationError if a rank is somewhere else in its program.
        """
        return self.ask(payload, what)()

    def ask(self, payload: bytes, what: str) -> Callable[[], list[bytes]]:
        """Begin an exchange: send this rank's payload, and wait for nobody.

        Returns the second half, which waits for the payloads of all ranks: to be called once, before the next exchange.
        """
        tag = _tag(what)
        self.check_usable()
        with self._failing():
            heard = self._say(tag + len(payload).to_bytes(1, "little") + payload, what)

        def hear() -> list[bytes]:
            self.check_usable()
            with self._failing():
                said = heard()
            for rank, each in enumerate(said):
                if each[:TAG_BYTES] != tag:
                    raise self.out_of_step(rank, what)
            return [each[TAG_BYTES + 1 :][: each[TAG_BYTES]] for each in said]

        return hear

    def _say(self, payload: bytes, what: str) -> Callable[[], list[bytes]]:
        if self.shared is None:
            assert self.gather_apart is not None
            return self.gather_apart(payload.ljust(CELL_BYTES, b"\0"))
        shared = self.shared
        shared.say(payload)

        def hear() -> list[bytes]:
            self.wait(shared.heard, shared.missing, f"waited to hear of {what}")
            return shared.hear()

        return hear

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Fail this rank if it raises in the middle of an exchange, as by Ctrl-C: it has spoken but has not heard."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def exchange_text(self, text: bytes, what: str) -> list[bytes]:
        """Return what every rank says about `what`, by rank, in texts of any length, in several exchanges."""
        sizes = [int.from_bytes(each, "little") for each in self.exchange(len(text).to_bytes(8, "little"), what)]
        if self.shared is None:
            assert self.texts_apart is not None
            self.check_usable()
            with self._failing():
                return self.texts_apart(text, sizes)
        parts: list[list[bytes]] = [[] for _ in sizes]
        for start in range(0, max(sizes), PAYLOAD_BYTES):
            for rank, part in enumerate(self.exchange(text[start : start + PAYLOAD_BYTES], what)):
                parts[rank].append(part)
        return [b"".join(each) for each in parts]

    def out_of_step(self, rank: int, what: str) -> ConfigurationError:
        """Fail this rank, and return the error for a rank that exchanges something else at this point."""
        text = f"rank {self.rank} exchanges {what}, rank {rank} something else: the ranks make different calls"
        error = ConfigurationError(f"{text}. Destroy the group and make a new one")
        self.fail(error)
        return error

    # ---------- waiting

    def wait(
        self, attempt: Callable[[float], bool], peer: int | Callable[[], int | None], what: str,
        limit_seconds: float | None = None,
    ) -> None:  # fmt: skip
        """Wait until attempt(seconds) succeeds, up to the time limit. Raises PeerLost.

        peer: the rank that is waited for, or a function that returns the rank which is missing at the moment; if it
        returns None, a rank died on the way. limit_seconds: the time limit; None: the transport's own.
        """
        self.progress()
        if attempt(PROMPT_SECONDS):  # as nearly always: not worth telling anyone
            return
        limit_seconds = self.timeout_seconds if limit_seconds is None else limit_seconds
        deadline = time.monotonic() + limit_seconds
        while True:
            missing = peer() if callable(peer) else peer
            missing = (self.rank + 1) % self.world_size if missing is None else missing
            self.board.note_waiting(missing)
            self.progress()
            if attempt(min(SLICE_SECONDS, max(0.0, deadline - time.monotonic()))):
                break
            late = time.monotonic() >= deadline
            if (late or self.is_hopeless(missing)) and not attempt(0.0):
                raise self.lost(missing, what, f"no answer within {limit_seconds:g} s" if late else "")
        self.board.note_waiting(None)

    def is_hopeless(self, peer: int) -> bool:
        """Return True if there is a verdict, or if the peer or a rank that it waits for is gone."""
        return self.board.verdict() is not None or self._chain_end(peer)[1] == "gone"

    # ---------- blame

    def check_usable(self) -> None:
        """Raise the error again that broke this group; ConfigurationError if its transport was closed."""
        if self.closed:
            raise ConfigurationError("this transport was closed: make a new ContextParallel or TensorParallel")
        if self.broken is not None:
            raise PeerLost(
                f"this group was broken before: {self.broken}. Destroy it and make a new one",
                self.broken.rank,
                self.broken.certain,
            )

    def lost(self, peer: int, what: str, found: str) -> PeerLost:
        """Make the error for a wait for `peer` that failed; it names the rank to blame, on which all ranks agree."""
        self.board.publish_waiting(peer)
        verdict = self._find_verdict(peer, found)
        said = self._text(verdict, peer, what, found), verdict.rank, verdict.certain
        self.broken = PeerLost(*said)
        return PeerLost(*said)  # another one: what is raised gets the frames of all callers, which are not to be kept

    def fail(self, error: BaseException) -> None:
        """Give up in the middle of a call: report this rank as lost, so that the others need not wait for it."""
        if self.broken is None:
            text = f"it raised {type(error).__name__}: {error}"
            self.broken = PeerLost(f"rank {self.rank} (this one) is lost: {text}", self.rank, True)
            self.board.claim(FailureReport(self.rank, text, self.rank, True))

    def _find_verdict(self, peer: int, found: str) -> FailureReport:
        deadline = time.monotonic() + GRACE_SECONDS
        while (verdict := self.board.verdict()) is None:
            rank, state = self._chain_end(peer)
            late = time.monotonic() >= deadline
            if state is None and late:
                rank, state = self._any_in_trouble() or (rank, None)
            if state is not None:
                why = f"its process (pid {self.members[rank].pid} on {self.members[rank].host}) is {state}"
                return self.board.claim(FailureReport(rank, why, self.rank, True))
            if late:
                why = f"it is silent: {found or 'no answer'}"
                return self.board.claim(FailureReport(rank, why, self.rank, False))
            time.sleep(0.02)
        return verdict

    def _chain_end(self, peer: int) -> tuple[int, str | None]:
        """Return the end of the chain of who waits for whom, from a peer on.

        That is the first rank whose process is in trouble, and its state; else the last rank, and None.
        """
        seen = {self.rank}
        at = peer
        while True:
            if (state := self.members[at].state(self.members[self.rank])) is not None:
                return at, state
            seen.add(at)
            after = self.board.waits(at)
            if after is None or after in seen:
                return at, None
            at = after

    def _any_in_trouble(self) -> tuple[int, str] | None:
        for rank, member in enumerate(self.members):
            if rank != self.rank and (state := member.state(self.members[self.rank])) is not None:
                return rank, state
        return None

    def _text(self, verdict: FailureReport, peer: int, what: str, found: str) -> str:
        by = "" if verdict.by == self.rank else f", as rank {verdict.by} found"
        text = f"rank {verdict.rank} of {self.world_size} is lost: {verdict.why}{by}. Rank {self.rank} {what}"
        text += "" if verdict.rank == peer else f" from rank {peer}"
        text += f": {found}" if found and found not in verdict.why else ""
        if getattr(self.board, "silent", False):
            text += f". The group's store is silent too, so rank {verdict.rank} {MAY_WAIT}"
        elif not verdict.certain and self.shared is None:  # who waits for whom is known only from waits that failed
            text += f". Nobody can look at it from another machine: rank {verdict.rank} {MAY_WAIT}, or be slow"
            text += " (then raise timeout_seconds)"
        elif not verdict.certain:
            text += ". It waits for no other rank that could be seen; if it is only slow, raise timeout_seconds"
        return text + f". Look at the log of rank {verdict.rank} first; then destroy the group and make a new one"


@lru_cache(maxsize=64)
def _tag(what: str) -> bytes:
    return hashlib.sha256(what.encode()).digest()[:TAG_BYTES]


class Controlled(Transport):
    """The part of a transport that its control does for it."""

    control: Control

    def prepare(self, links: Iterable[Link], device: torch.device) -> None:
        """Check the device. All ranks are connected from the start. Raises ConfigurationError unless it is the CPU."""
        if device.type != "cpu":
            raise ConfigurationError(
                f"transport {self.control.transport!r} moves tensors in the memory of the CPU, and these are on "
                f"{device}: use transport='auto' for NPUs and CUDA devices; tensors of others must be moved to the CPU"
            )

    def before_exchange(self) -> None:
        """Do what comes first in each exchange, and raise what keeps it from beginning. Here: nothing."""

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Gather a payload of every rank; see Transport.exchange."""
        self.before_exchange()
        return self.control.exchange(payload, what)

    def exchange_text(self, text: bytes, what: str) -> list[bytes]:
        """Gather a text of every rank; see Transport.exchange_text."""
        self.before_exchange()
        return self.control.exchange_text(text, what)

    def lost(self, peer: int, what: str, found: str) -> PeerLost:
        """Make the error for a failed wait; see Transport.lost."""
        return self.control.lost(peer, what, found)

    def fail(self, error: BaseException) -> None:
        """Give up in the middle of a call; see Transport.fail."""
        self.control.fail(error)


def own_store(control: Control, group: Held, channel: str) -> Any:
    """Return the part of the group's store that no other group and no other transport uses."""
    return PrefixStore(f"tokenring/{control.name}/{channel}", held(group).store())


Agree = Callable[[str, str], list[str]]  # what it is about, this rank's trouble → the trouble of each rank


def shared_segment(
    name: str, size_bytes: int, rank: int, agree: Agree, init: Callable[[Segment, bool], None]
) -> tuple[Segment | None, str]:
    """Make a new segment that all ranks have mapped, and remove its name.

    Returns the segment and "", or None and why there is none; all ranks get the same answer.
    """
    made: list[Segment] = []

    def attempt(create: bool) -> str:
        try:
            made.append(Segment(name, size_bytes, create))
            init(made[0], create)
        except (OSError, ValueError) as error:  # ValueError: mapping a file that is shorter
            text = f"rank {rank} cannot {'make' if create else 'map'} {size_bytes} bytes in /dev/shm: {error}"
            return text + (ENLARGE if getattr(error, "errno", None) == errno.ENOSPC else "")
        return ""

    try:
        troubles = agree("shared memory", attempt(True) if rank == 0 else "")
        if not any(troubles):
            troubles = agree("shared memory, mapped", attempt(False) if rank else "")
    finally:
        # Whoever gets here takes the name away: the rank that made it may be dead.
        Segment.unlink_name(name)
    trouble = next(filter(None, troubles), "")
    return (None, trouble) if trouble else (made[0], "")
