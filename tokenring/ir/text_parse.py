"""The grid of `text` read back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenring.errors import ConfigurationError, ScheduleError
from tokenring.ir.json import known_layout
from tokenring.ir.operators import OPERATORS
from tokenring.ir.passes import move_order
from tokenring.ir.schedule_data import (
    PARTIAL_OF,
    PARTIALS,
    REQUESTS,
    Block,
    Kind,
    Move,
    Runs,
    ScheduleData,
    Tile,
    TileOperator,
)
from tokenring.ir.text import LETTERS, WORD
from tokenring.sequence.layout import Layout, Positions
from tokenring.sequence.mask import Mask, parse_mask

KINDS: dict[str, Kind] = {letters: kind for kind, letters in LETTERS.items()}
NUMBER = re.compile("[0-9]{1,15}")
ITEM = re.compile(r"([0-9]+(?:-[0-9]+)?)(?:\.p([0-9]+))?(?:@([0-9]+))?(?:\[([0-9:+]*)\])?")
TILE = re.compile(r"(?:h([0-9]+):)?q([^×x]+)[×x]kv([^×x]+)")
SEND = re.compile(r"(?:h([0-9]+):)?(q|kv|o|dkv)([^>]+)>([0-9,-]+)(\+?)")
CODEC = re.compile(rf"(?<!\S)(q_partial|kv_partial|q|kv)=({WORD})(?!\S)", re.ASCII)
CHUNK_LIMIT = 2**20  # chunks that "0-99" in a layout may stand for


class Spot(NamedTuple):
    """A part of the text and where it begins, for errors that say so."""

    line: int
    column: int
    text: str

    def error(self, why: str) -> ScheduleError:
        """Return an error that says where in the text it is, and then what is wrong."""
        shown = self.text if len(self.text) <= 40 else self.text[:37] + "..."
        return ScheduleError(f"line {self.line}, column {self.column}: {shown!r} {why}")

    def group(self, match: re.Match[str], group: int | str = 0) -> Spot:
        """Return the part that a pattern found in this text; empty, where the line ends, if it found none."""
        start = match.start(group)
        return Spot(self.line, self.column + (start if start >= 0 else len(self.text)), match[group] or "")

    def strip(self) -> Spot:
        """Return this part without the blanks around it."""
        bare = self.text.lstrip()
        return Spot(self.line, self.column + len(self.text) - len(bare), bare.rstrip())

    def split(self, separator: str) -> Iterator[Spot]:
        """Yield the parts between separators, without the blanks around them."""
        column = self.column
        for part in self.text.split(separator):
            yield Spot(self.line, column, part).strip()
            column += len(part) + len(separator)

    def words(self) -> Iterator[Spot]:
        """Yield the parts between blanks."""
        return (self.group(match) for match in re.finditer(r"\S+", self.text))

    def integer(self, least: int = 0) -> int:
        """Return a number in digits. Raises ScheduleError if it is none, or below `least`."""
        if not NUMBER.fullmatch(self.text) or int(self.text) < least:
            raise self.error(f"is not a number of at least {least}")
        return int(self.text)

    def ordinal(self, count: int, what: str) -> int:
        """Return the number of one of `count` things, from 0 on. Raises ScheduleError if there are not so many."""
        value = self.integer()
        if value >= count:
            raise self.error(f"is not {what} of {count}")
        return value

    def span(self, count: int, what: str) -> range:
        """Return the range that `3` or `0-3` stands for. Raises ScheduleError if it is empty or beyond `count`."""
        first, last = (*self.split("-"), self)[:2] if "-" in self.text else (self, self)
        start, stop = first.ordinal(count, what), last.ordinal(count, what) + 1
        if stop <= start:
            raise self.error("is an empty range")
        return range(start, stop)

    def numbers(self, count: int, what: str) -> list[int]:
        """Return the numbers that `0-3,6` stands for. Raises ScheduleError as `span` does."""
        return [number for item in self.split(",") for number in item.span(count, what)]

    def name(self) -> str:
        """Return a name that is quoted or not. Raises ScheduleError if it is none."""
        try:
            name = json.loads(self.text) if self.text.startswith('"') else self.text
        except ValueError:
            name = ""
        if not name or not name.isprintable() or not re.fullmatch(WORD, self.text, re.ASCII):
            raise self.error("is not a name; quote it as in JSON")
        return str(name)


def parse_text(text: str) -> ScheduleData:
    """Return the schedule that to_text printed; not verified. Raises ScheduleError with line and column."""
    every = [Spot(number, 1, line.rstrip()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [line for line in every if line.text and not line.text.lstrip().startswith("#")]
    start = next((i for i, line in enumerate(lines) if next(line.split("|")).text == "step"), None)
    if start is None:
        raise every[-1].error("is the end, but there is no line 'step | rank 0 | ...'")
    frame = _Header(lines[:start], lines[start]).frame()
    _check_heading(lines[start], frame.world_size)
    return _fill(frame, lines[start + 1 :])


def _check_heading(heading: Spot, world_size: int) -> None:
    for rank, cell in enumerate(_cells(heading, world_size)):
        if cell.text.split() != ["rank", str(rank)]:
            raise cell.error(f"should be 'rank {rank}'")


def _cells(line: Spot, world_size: int) -> list[Spot]:
    _, *cells = line.split("|")
    if len(cells) != world_size:
        raise line.error(f"has {len(cells)} cells for {world_size} ranks")
    return cells


class _Header:
    """The lines before the grid, by their first word."""

    def __init__(self, lines: Sequence[Spot], end: Spot) -> None:
        self.end = end
        self.values: dict[str, Spot] = {}
        self.unused: dict[str, Spot] = {}
        for line in lines:
            match = re.fullmatch(r"\s*(\S+)\s*(.*)", line.text)
            assert match  # a line has at least one word
            key = line.group(match, 1)
            if key.text in self.values:
                raise key.error("stands twice")
            self.values[key.text], self.unused[key.text] = line.group(match, 2), key

    def optional(self, key: str) -> Spot | None:
        """Return what stands behind a word of the header, None if the word is not there."""
        self.unused.pop(key, None)
        return self.values.get(key)

    def __getitem__(self, key: str) -> Spot:
        value = self.optional(key)
        if value is None:
            raise self.end.error(f"comes before any line {key!r}")
        return value

    def number(self, key: str) -> int:
        """Return the number behind a word of the header; 1 if the word is not there."""
        value = self.optional(key)
        return 1 if value is None else value.integer(1)

    def frame(self) -> ScheduleData:
        """Return the schedule of the header, without its tiles and moves. Raises ScheduleError."""
        world = self["ranks"].integer(1)
        shared = self._layout("", world) if "layout" in self.values else None
        q_layout = shared or self._layout("q_", world)
        kv_layout = shared or self._layout("kv_", world)
        slack = self.optional("slack")
        frame = ScheduleData(
            self["schedule"].name(),
            world,
            q_layout,
            kv_layout,
            self._mask(q_layout.length, kv_layout.length),
            (),
            (),
            self.number("head_groups"),
            self._pieces("q_pieces", q_layout),
            self._pieces("kv_pieces", kv_layout),
            self._keep(),
            None if slack is None else slack.integer(),
            self._codecs(),
            self._operator(),
        )
        for key in self.unused.values():
            raise key.error("is not a line of the header")
        return frame

    def _layout(self, prefix: str, world_size: int) -> Layout:
        spot = self[f"{prefix}layout"]
        match = re.fullmatch(rf"({WORD}) of ([0-9]+):(.*)", spot.text, re.ASCII)
        if match is None:
            raise spot.error("is not 'NAME of LENGTH: chunks of rank 0 | chunks of rank 1 | ...'")
        name, length = spot.group(match, 1).name(), spot.group(match, 2).integer(1)
        owners = _owners(spot.group(match, 3).strip(), world_size)
        chunks = self.optional(f"{prefix}chunks")
        if chunks is not None:
            try:
                return Layout(name, world_size, length, _chunks(chunks, length), owners)
            except ConfigurationError as error:
                raise spot.error(f"cannot be: {error}") from None
        known = known_layout(name, world_size, length, len(owners))
        if known is None or known.owners != owners:
            raise spot.error(f"is not a known layout: give its positions in a line '{prefix}chunks'")
        return known

    def _mask(self, length: int, kv_length: int) -> Mask:
        spot = self["mask"]
        try:
            mask = parse_mask(spot.text)
            mask.check_lengths(length, kv_length)
            return mask
        except ConfigurationError as error:
            raise spot.error(f"is not a mask for {length} positions: {error}") from None

    def _pieces(self, key: str, layout: Layout) -> int:
        pieces = self.number(key)
        if not layout.takes_pieces(pieces):
            raise self.values[key].error(f"pieces do not divide chunks of {layout.chunk_length} positions")
        return pieces

    def _keep(self) -> frozenset[str]:
        spot = self.optional("keep")
        if spot is not None and not set(spot.text.split()) <= set(PARTIAL_OF):
            raise spot.error("is not 'q', 'kv' or 'kv q'")
        return frozenset() if spot is None else frozenset(spot.text.split())

    def _operator(self) -> TileOperator:
        spot = self.optional("operator")
        if spot is not None and spot.text not in OPERATORS:
            raise spot.error(f"is not one of {', '.join(OPERATORS)}")
        return OPERATORS["attention" if spot is None else spot.text]

    def _codecs(self) -> tuple[tuple[str, str], ...]:
        spot = self.optional("codecs")
        if spot is None:
            return ()
        found = list(CODEC.finditer(spot.text))
        if not found or CODEC.sub("", spot.text).strip():
            raise spot.error("is not like 'q=bf16 kv=bf16'")
        codecs = tuple((match[1], spot.group(match, 2).name()) for match in found)
        if len(dict(codecs)) < len(codecs):
            raise spot.error("names a kind twice")
        return codecs


def _owners(spot: Spot, world_size: int) -> tuple[int, ...]:
    groups = list(spot.split("|"))
    if len(groups) != world_size:
        raise spot.error(f"lists the chunks of {len(groups)} ranks, not of {world_size}")
    owner: dict[int, int] = {}
    for rank, group in enumerate(groups):
        for chunk in group.numbers(CHUNK_LIMIT, "a chunk"):
            if chunk in owner:
                raise group.error(f"has chunk {chunk}, which rank {owner[chunk]} has")
            owner[chunk] = rank
    if set(owner) != set(range(len(owner))):
        raise spot.error(f"leaves out chunk {min(set(range(len(owner))) - set(owner))}")
    return tuple(owner[chunk] for chunk in range(len(owner)))


def _chunks(spot: Spot, length: int) -> tuple[Positions, ...]:
    chunks = []
    for word in spot.words():
        start, *ends = word.split(":")
        if len(ends) not in (1, 2):
            raise word.error("is not start:stop or start:stop:step")
        first = start.integer()
        step = ends[1].integer(1) if len(ends) > 1 else 1
        chunks.append(Positions(first, ends[0].integer(first + (first < length)), step))
    return tuple(chunks)


def _fill(frame: ScheduleData, lines: Sequence[Spot]) -> ScheduleData:
    tiles: list[Tile] = []
    moves: list[Move] = []
    before = -1
    for line in lines:
        cells = _cells(line, frame.world_size)
        spot = next(line.split("|"))
        step = spot.integer()
        if step <= before:
            raise spot.error(f"comes after step {before}")
        before = step
        for rank, cell in enumerate(cells):
            for word in cell.words():
                if match := TILE.fullmatch(word.text):
                    tiles.append(_tile(frame, step, rank, word, match))
                elif match := SEND.fullmatch(word.text):
                    moves.extend(_moves(frame, step, rank, word, match))
                else:
                    raise word.error("is neither a tile like q0,7×kv3 nor a move like kv3>2")
    return frame.replace(tiles=tuple(tiles), moves=tuple(sorted(moves, key=move_order)))


def _tile(frame: ScheduleData, step: int, rank: int, word: Spot, match: re.Match[str]) -> Tile:
    heads = _heads(frame, word, match)
    q = _whole(_blocks(frame, "q", heads, word.group(match, 2)), word)
    return Tile(step, rank, tuple(q), tuple(_whole(_blocks(frame, "kv", heads, word.group(match, 3)), word)))


def _moves(frame: ScheduleData, step: int, rank: int, word: Spot, match: re.Match[str]) -> Iterator[Move]:
    kind, add = KINDS[match[2]], bool(match[5])
    if add and kind in PARTIAL_OF:
        raise word.error("is a request, to which nothing is added")
    made_at = None if kind in PARTIAL_OF else rank
    blocks = list(_blocks(frame, kind, _heads(frame, word, match), word.group(match, 3), made_at))
    channel = REQUESTS if kind in PARTIAL_OF else PARTIALS
    for dst in word.group(match, 4).numbers(frame.world_size, "a rank"):
        yield from (Move(step, block, rank, dst, channel, add, rows) for block, rows in blocks)


def _heads(frame: ScheduleData, word: Spot, match: re.Match[str]) -> int:
    if match[1] is None and frame.head_groups > 1:
        raise word.error(f"does not say which of {frame.head_groups} head groups, as in h0:{word.text}")
    return 0 if match[1] is None else word.group(match, 1).ordinal(frame.head_groups, "a head group")


def _whole(blocks: Iterator[tuple[Block, Runs | None]], word: Spot) -> Iterator[Block]:
    for block, rows in blocks:
        if rows is not None:
            raise word.error("is a tile, which names no rows")
        yield block


def _blocks(
    frame: ScheduleData, kind: Kind, heads: int, spot: Spot, made_at: int | None = None
) -> Iterator[tuple[Block, Runs | None]]:
    name = "q" if kind.startswith("q") else "kv"
    for item in spot.split(","):
        match = ITEM.fullmatch(item.text)
        if match is None or (match[3] and made_at is None):
            raise item.error(f"is not a {name} chunk, a range of them or a piece of one")
        at = made_at if match[3] is None else item.group(match, 3).ordinal(frame.world_size, "a rank")
        pieces = range(frame.pieces_of(kind))
        if match[2] is not None:
            piece = item.group(match, 2).ordinal(len(pieces), f"a {name} piece")
            pieces = range(piece, piece + 1)
        rows = None if match[4] is None else _runs(item.group(match, 4), frame.unit_length(kind))
        for chunk in item.group(match, 1).span(len(frame.layout_of(kind).chunks), f"a {name} chunk"):
            yield from ((Block(kind, chunk, heads, piece, at), rows) for piece in pieces)


def _runs(spot: Spot, length: int) -> Runs:
    """Return the rows that `0:4+60:64` stands for. Raises ScheduleError unless they are runs of so many rows."""
    runs: list[tuple[int, int]] = []
    for part in spot.split("+"):
        ends = list(part.split(":"))
        if len(ends) != 2:
            raise part.error("is not start:stop")
        start, stop = (end.integer() for end in ends)
        if not (runs[-1][1] if runs else -1) < start < stop <= length:
            raise part.error(f"is not a run of {length} rows, or not beyond the run before it")
        runs.append((start, stop))
    return tuple(runs)
