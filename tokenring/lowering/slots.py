"""Buffer slots from lifetimes: which one a block gets, when it may be written again, which of its rows are filled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tokenring.lowering.program import Slot, Wait


@dataclass
class _State:
    sends: list[tuple[int, int]] = field(default_factory=list)  # (message, step) still to be waited for


class Slots:
    """Slots of a program: hands them out and emits the waits that make reuse safe.

    A slot whose last send was posted in the step before, or `patience` steps earlier than that, is
    waited for and reused; otherwise a new slot is made: this is how a ring needs two slots and a
    direct schedule one for each peer.
    """

    def __init__(self, emit: Callable[[Wait], None]) -> None:
        self.specs: list[Slot] = []
        self._states: list[_State] = []
        self._free: dict[Slot, list[int]] = {}  # by what they hold, in order
        self._emit = emit

    def take(self, spec: Slot, step: int, patience: int | None) -> int:
        """Take a slot for this content, a new one if no free one will do, and return it; patience None never waits."""
        if not spec.kept:
            free = self._free.get(spec, [])
            for clean in (True, False):
                for at, slot in enumerate(free):
                    if self._ready(self._states[slot], step, patience, clean):
                        self.settle(slot)
                        del free[at]
                        return slot
        self.specs.append(spec)
        self._states.append(_State())
        return len(self.specs) - 1

    def sent(self, slot: int, message: int, step: int) -> None:
        """Note that a send from this slot was posted."""
        self._states[slot].sends.append((message, step))

    def drop(self, slot: int) -> None:
        """Note that the slot was used for the last time (sends may still be on their way)."""
        free = self._free.setdefault(self.specs[slot], [])
        at = bisect_left(free, slot)
        if free[at : at + 1] != [slot]:
            free.insert(at, slot)

    def settle(self, slot: int) -> None:
        """Wait for the slot's sends."""
        state = self._states[slot]
        for message, _ in state.sends:
            self._emit(Wait(message))
        state.sends.clear()

    def settle_all(self) -> None:
        """Wait for the sends of all slots."""
        for slot in range(len(self.specs)):
            self.settle(slot)

    @staticmethod
    def _ready(state: _State, step: int, patience: int | None, clean: bool) -> bool:
        if clean or patience is None:
            return not state.sends
        return all(sent <= step - 1 - patience for _, sent in state.sends)


class Coverage:
    """The rows of an accumulator that hold something already: disjoint, sorted intervals."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the runs of [start, stop) that are wholly covered (True) or wholly not."""
        at = start
        for low, high in self._intervals:
            if high <= at or low >= stop:
                continue
            if low > at:
                yield at, low, False
            at = max(at, low)
            end = min(high, stop)
            yield at, end, True
            at = end
        if at < stop:
            yield at, stop, False

    def add(self, start: int, stop: int) -> None:
        """Mark rows [start, stop) as covered."""
        last = self._intervals[-1] if self._intervals else None
        if last is None or start > last[1]:  # rows mostly come in order
            self._intervals.append((start, stop))
            return
        if start >= last[0]:
            self._intervals[-1] = (last[0], max(last[1], stop))
            return
        merged = (start, stop)
        rest = []
        for low, high in self._intervals:
            if high < merged[0] or low > merged[1]:
                rest.append((low, high))
            else:
                merged = (min(low, merged[0]), max(high, merged[1]))
        self._intervals = sorted([*rest, merged])

    def overlaps(self, start: int, stop: int) -> bool:
        """Return whether any row of [start, stop) is covered."""
        return any(covered for _, _, covered in self.runs(start, stop))
