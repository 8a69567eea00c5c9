"""Messages that go as one: what one rank gives another in one step, on one channel, to be used at one point.

What a message costs beside its bytes is paid once for all of them; they cost a copy at each end more, since they lie
apart there: the two chunks of a zigzag layout, q and kv. So only small ones go together (`Target.bundle_bytes`).
Both ends find the same from the schedule alone.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenring.ir.schedule_data import Pass
from tokenring.lowering.program import BUNDLE
from tokenring.lowering.records import Records, nbytes
from tokenring.lowering.storage import Message, Storage
from tokenring.lowering.uses import Uses, first_uses, points

Queue = tuple[int, int, str]  # source, destination, channel


class Bundle(NamedTuple):
    """Messages of one queue that follow each other there."""

    ranks: tuple[int, int]
    messages: tuple[Message, ...]
    kind: str = BUNDLE
    parts: int = 1

    @property
    def label(self) -> str:
        """Name of the bundle: the same at both ends, and of no other bundle of the pass."""
        return f"{self.messages[0].label} and {len(self.messages) - 1} more"


def bundles(
    storage: Storage, rank: int, direction: Pass, records: Records, most_bytes: int
) -> tuple[Bundle, ...]:
    """Return the bundles that a rank sends or receives in a pass, of at most so many bytes each."""
    uses = first_uses(storage, direction)
    runs: dict[Queue, list[list[Message]]] = {}
    for message in storage.messages(rank, direction):
        some = runs.setdefault((message.src, message.dst, message.channel), [])
        if some and _together(some[-1][-1], message, uses) and nbytes([*some[-1], message], records) <= most_bytes:
            some[-1].append(message)
        else:
            some.append([message])
    found = (run for some in runs.values() for run in some if len(run) > 1)
    return tuple(Bundle((run[0].src, run[0].dst), tuple(run)) for run in found)


def _together(a: Message, b: Message, uses: Uses) -> bool:
    return a.step == b.step and len(needed := points(a, uses)) == 1 and needed == points(b, uses)
