"""Coverage: the rows of an accumulator that hold something already."""

from __future__ import annotations

from collections.abc import Iterator


class Coverage:
    """Disjoint, sorted row intervals."""

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
