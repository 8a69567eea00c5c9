"""Exchanges between ranks that share no memory, whatever moves the payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenring.backends.control.control import Control
from tokenring.backends.control.sockets import PeerSockets
from tokenring.weak_method import weakly

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

# Up to so many ranks agree in one round, whose messages leave before any others: those of a later round would wait for
# what is queued before them on the same links.
WAYS = 8
PART_BYTES = 8192  # of a text that are sent at once: two parts fit any socket's buffer, so that no send waits


class Apart:
    """The exchange of a control whose ranks share no memory.

    First all find out whether everybody says the same, as nearly always, with few messages; if not, each tells each.
    """

    def __init__(self, control: Control, group: Held) -> None:
        self._control, self._sockets = control, PeerSockets(control, group)
        control.gather_apart, control.texts_apart = weakly(self._gather), weakly(self._texts)

    @staticmethod
    def where_needed(control: Control, group: Held) -> Apart | None:
        """Make the exchange for whoever made the control to hold; return None where ranks share memory."""
        return Apart(control, group) if control.shared is None else None

    def _gather(self, payload: bytes) -> Callable[[], list[bytes]]:
        alike = self._compare(payload)
        return lambda: [payload] * self._control.world_size if alike() else self._tell_each(payload)

    def _compare(self, payload: bytes) -> Callable[[], bool]:
        """Begin to find out if all ranks say the same, with the same answer on all; the first messages leave at once.

        As in the n-way dissemination barrier (Hoefler et al., "Fast Barrier Synchronization for InfiniBand", IPDPS
        2006): in each round a rank hears from WAYS - 1 others, each of which speaks for all that it has heard of.
        """
        world_size, mine = self._control.world_size, payload + b"\1"
        first = self._say(range(1, min(WAYS, world_size)), mine)

        def hear() -> bool:
            step, said, heard = 1, mine, first
            while True:
                if any(each != mine for each in heard().values()):
                    said = payload + b"\0"
                step *= WAYS
                if step >= world_size:
                    return said == mine
                heard = self._say(range(step, min(WAYS * step, world_size), step), said)

        return hear

    def _tell_each(self, payload: bytes) -> list[bytes]:
        """Return what all ranks say, by rank; all payloads have the same size."""
        world_size = self._control.world_size
        said = self._say(range(1, world_size), payload)()
        return [said.get(rank, payload) for rank in range(world_size)]

    def _say(self, steps: range, said: bytes) -> Callable[[], dict[int, bytes]]:
        """Send it to the ranks so many steps onwards. The result waits for as much from those so many steps back."""
        rank, world_size = self._control.rank, self._control.world_size
        for step in steps:
            self._sockets.send((rank + step) % world_size, said)
        backwards = [(rank - step) % world_size for step in steps]
        return lambda: {peer: self._sockets.recv(peer, len(said)) for peer in backwards}

    def _texts(self, text: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Return the texts of all ranks, whose sizes in bytes all know: a rank without a text sends nothing."""
        rank, world_size = self._control.rank, self._control.world_size
        said = [bytearray() for _ in sizes]
        for start in range(0, max(sizes), PART_BYTES):
            part = text[start : start + PART_BYTES]
            for step in range(1, world_size) if part else ():
                self._sockets.send((rank + step) % world_size, part)
            for step in range(1, world_size):
                peer = (rank - step) % world_size
                if (left := sizes[peer] - start) > 0:
                    said[peer] += self._sockets.recv(peer, min(left, PART_BYTES))
        return [text if peer == rank else bytes(each) for peer, each in enumerate(said)]
