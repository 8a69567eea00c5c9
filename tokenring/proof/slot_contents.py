"""Contents of the slots of programs that are replayed: tokens, and results with the kernel calls that made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

NOBODY = -1  # owner of rows that were filled: a result for whichever token, of no kernel call


class Missing(Exception):
    """A row from which on rows hold nothing."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class Mixed(Exception):
    """Results for different tokens meet in one row."""

    def __init__(self, held: ContentRun) -> None:
        super().__init__(held)
        self.held = held


class Twice(Exception):
    """The results of these kernel calls (bits) meet themselves in one row."""

    def __init__(self, again: int) -> None:
        super().__init__(again)
        self.again = again


class ContentRun(NamedTuple):
    """Rows [start, stop) hold neighbouring tokens of one rank, from its own row `row` on, or results for them.

    made: the kernel calls whose results are merged in these rows, as bits. coder: the rank that encoded some of these.
    """

    start: int
    stop: int
    owner: int
    row: int
    made: int = 0
    coder: int | None = None


Rows = dict[int, ContentRun]  # disjoint, by their first row
Tokens = tuple[tuple[int, int, int], ...]  # what rows hold one after another: how many tokens, whose, from which row


def clip(run: ContentRun, start: int, stop: int) -> ContentRun:
    """Return what of the run lies in rows [start, stop)."""
    low, high = max(start, run.start), min(stop, run.stop)
    return ContentRun(low, high, run.owner, run.row + low - run.start, run.made, run.coder)


def overlaps(rows: Rows, start: int, stop: int) -> bool:
    """Return whether any of rows [start, stop) hold something."""
    if start in rows:
        return True
    for low, high, _, _, _, _ in rows.values():  # noqa: SIM110 - asked for each write; `any` takes thrice as long
        if start < high and low < stop:
            return True
    return False


def read(rows: Rows, start: int, stop: int) -> list[ContentRun]:
    """Return what lies in rows [start, stop). Raises Missing if there is a row that holds nothing."""
    run = rows.get(start)
    if run is not None and run.stop == stop:
        return [run]
    if run is None:
        run = next((each for each in rows.values() if each.start < start < each.stop), None)
    found: list[ContentRun] = []
    at = start
    while run is not None:
        found.append(clip(run, start, stop))
        at = run.stop
        if at >= stop:
            return found
        run = rows.get(at)
    raise Missing(at)


def add(rows: Rows, run: ContentRun) -> None:
    """Merge a run into rows that hold results already. Raises Missing, Mixed, Twice."""
    held = rows.get(run.start)
    if held is not None and held.stop == run.stop:
        rows[held.start] = _joined(held, run)
        return
    _cut(rows, run.start)
    _cut(rows, run.stop)
    for part in read(rows, run.start, run.stop):
        rows[part.start] = _joined(part, clip(run, part.start, part.stop))


def empty(rows: Rows, start: int, stop: int) -> None:
    """Let rows [start, stop) hold nothing."""
    held = rows.get(start)
    if held is not None and held.stop == stop:
        del rows[start]
        return
    _cut(rows, start)
    _cut(rows, stop)
    for at in [at for at in rows if start <= at < stop]:
        del rows[at]


def _joined(held: ContentRun, run: ContentRun) -> ContentRun:
    if held.owner == NOBODY:
        held = run._replace(made=0)
    elif run.owner not in (NOBODY, held.owner) or (run.owner != NOBODY and run.row != held.row):
        raise Mixed(held)
    if held.made & run.made:
        raise Twice(held.made & run.made)
    coder = run.coder if held.coder is None else held.coder
    return ContentRun(held.start, held.stop, held.owner, held.row, held.made | run.made, coder)


def _cut(rows: Rows, at: int) -> None:
    """Make `at` the start of a run, if rows on both sides of it belong to one."""
    if at in rows:
        return
    for run in rows.values():
        if run.start < at < run.stop:
            rows[run.start] = clip(run, run.start, at)
            rows[at] = clip(run, at, run.stop)
            return


def moved(runs: list[ContentRun], by: int) -> list[ContentRun]:
    """Return the same runs in rows that lie so much further down."""
    return runs if by == 0 else [ContentRun(run[0] + by, run[1] + by, *run[2:]) for run in runs]


def tokens_of(runs: list[ContentRun]) -> Tokens:
    """Return which tokens the runs hold, however they are cut."""
    if len(runs) == 1:
        run = runs[0]
        return ((run.stop - run.start, run.owner, run.row),)
    return joined_tokens((run.stop - run.start, run.owner, run.row) for run in runs)


def joined_tokens(parts: Iterable[tuple[int, int, int]]) -> Tokens:
    """Return the same tokens, those that are neighbours at their owner as one."""
    found: list[tuple[int, int, int]] = []
    for count, first_owner, first in parts:
        if found:
            before, owner, row = found[-1]
            if owner == first_owner and row + before == first:
                found[-1] = (before + count, owner, row)
                continue
        found.append((count, first_owner, first))
    return tuple(found)


def results(tokens: Tokens, first: int, start: int, stop: int, made: int) -> list[ContentRun]:
    """Return the results for the tokens from the `first` on, in rows [start, stop)."""
    runs, at = [], start - first
    for count, owner, row in tokens:
        low, high = max(at, start), min(at + count, stop)
        if low < high:
            runs.append(ContentRun(low, high, owner, row + low - at, made))
        at += count
    return runs
