"""The schedule as JSON that other programs can replay and check: docs/schedule-json.md is the format."""

from __future__ import annotations

import json
from collections import Counter
from heapq import merge

from tokenring.errors import ConfigurationError, ScheduleError
from tokenring.ir.json_node import INTEGER_LIMIT, JsonNode, shown_short
from tokenring.ir.passes import move_order
from tokenring.ir.schedule_data import (
    ATTENTION,
    KINDS,
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
from tokenring.sequence.layout import Layout, Positions, make_layout
from tokenring.sequence.mask import DEEPEST, Mask

FORMAT = "tokenring-schedule"
VERSION = 1
PARTS_VERSION = 2  # of documents with moves of some rows, or chunks that the end cuts: version 1 knows of neither
MORE_OF_MASKS = {"chunks", "slices", "either", "q_start"}  # keys of masks that three numbers do not say


def to_json(schedule: ScheduleData) -> str:
    """Return the schedule as a document of the JSON format, with one tile or move a line."""
    return _dump(_document(schedule)) + "\n"


def _document(schedule: ScheduleData) -> dict[str, object]:
    requests = [move for move in schedule.moves if move.block.kind in PARTIAL_OF]
    partials = [move for move in schedule.moves if move.block.kind not in PARTIAL_OF]
    return {
        "format": FORMAT,
        "version": PARTS_VERSION if _has_parts(schedule) else VERSION,
        "name": schedule.name,
        "world_size": schedule.world_size,
        "mask": mask_document(schedule.mask),
        "q_layout": _layout_document(schedule.q_layout),
        "kv_layout": _layout_document(schedule.kv_layout),
        "head_groups": schedule.head_groups,
        "q_pieces": schedule.q_pieces,
        "kv_pieces": schedule.kv_pieces,
        "keep": sorted(schedule.keep),
        "slack": schedule.slack,
        "codecs": [{"kind": kind, "codec": codec} for kind, codec in schedule.codecs],
        **({} if schedule.operator == ATTENTION else {"operator": schedule.operator.name}),
        "tiles": [_tile_document(schedule, tile) for tile in schedule.tiles],
        "moves": [_move_document(schedule, move) for move in requests],
        "returns": [_return_document(schedule, move) for move in partials],
    }


def _has_parts(schedule: ScheduleData) -> bool:
    return schedule.cuts_rows or not (schedule.q_layout.is_even and schedule.kv_layout.is_even)


def mask_document(mask: Mask) -> dict[str, object]:
    """Return a mask as an object of the JSON format: three keys, and four more where these do not say it."""
    document: dict[str, object] = {"low": mask.low, "high": mask.high, "cu_seqlens": mask.cu_seqlens}
    if mask.numbers is None:
        return document
    from tokenring.sequence.slices import slice_row

    either = [[mask_document(each) for each in masks] for masks in mask.either]
    return document | {
        "chunks": mask.chunks,
        "slices": None if mask.slices is None else [slice_row(each) for each in mask.slices],
        "either": either,
        "q_start": mask.q_start,
    }


def _layout_document(layout: Layout) -> dict[str, object]:
    pairs = zip(layout.chunks, layout.owners, strict=True)
    chunks = [chunk._asdict() | {"owner": owner} for chunk, owner in pairs]
    return {"name": layout.name, "length": layout.length, "chunks": chunks}


def _tile_document(schedule: ScheduleData, tile: Tile) -> dict[str, object]:
    blocks = (*tile.q, *tile.kv)
    kinds = [block.kind for block in blocks]
    fits = tile.q and tile.kv and kinds == ["q"] * len(tile.q) + ["kv"] * len(tile.kv)
    if not fits or len({block.heads for block in blocks}) != 1:
        raise ScheduleError(f"{schedule.name}: step {tile.step}, rank {tile.rank}: cannot be written: {tile}")
    q, kv = ([{"chunk": block.chunk, "piece": block.piece} for block in part] for part in (tile.q, tile.kv))
    return {"step": tile.step, "rank": tile.rank, "heads": tile.heads, "q": q, "kv": kv}


def _move_document(schedule: ScheduleData, move: Move) -> dict[str, object]:
    if move.add or move.block.made_at is not None:
        raise ScheduleError(f"{schedule.name}: step {move.step}, rank {move.src}: not a request: {move}")
    head, tail = _common(move)
    return head | tail


def _return_document(schedule: ScheduleData, move: Move) -> dict[str, object]:
    if move.block.made_at is None:
        raise ScheduleError(f"{schedule.name}: step {move.step}, rank {move.src}: made nowhere: {move}")
    head, tail = _common(move)
    return head | {"made_at": move.block.made_at} | tail | {"add": move.add}


def _common(move: Move) -> tuple[dict[str, object], dict[str, object]]:
    block = move.block
    unit = {"kind": block.kind, "chunk": block.chunk, "heads": block.heads, "piece": block.piece}
    rows = {} if move.rows is None else {"rows": move.rows}
    return {"step": move.step, **unit}, {"src": move.src, "dst": move.dst, "channel": move.channel, **rows}


def _dump(value: object, depth: int = 0) -> str:
    """Return a value as JSON, with each tile, move, chunk, and key of the objects around them, on its own line."""
    if isinstance(value, dict) and (depth == 0 or any(map(_is_table, value.values()))):
        parts, ends = [f"{json.dumps(key)}: {_dump(part, depth + 1)}" for key, part in value.items()], "{}"
    elif isinstance(value, list) and _is_table(value):
        parts, ends = [json.dumps(part) for part in value], "[]"
    else:
        return json.dumps(value)
    inner = "\n" + "  " * (depth + 1)
    return ends[0] + inner + f",{inner}".join(parts) + "\n" + "  " * depth + ends[1]


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def from_json(text: str) -> ScheduleData:
    """Return the schedule in a document of the format; its form is checked, its proof is left to `verify`.

    Raises ScheduleError, which says where in the document.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except ScheduleError:
        raise
    except RecursionError:
        raise ScheduleError("document: nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise ScheduleError(f"document: not JSON: {error}") from None
    return _schedule(JsonNode(value, ""))


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ScheduleError(f"document: the key {shown_short(twice)} stands twice in one object")
    return made


def _schedule(root: JsonNode) -> ScheduleData:
    kind = root.fields("format", "version", others=True)
    kind["format"].choice(FORMAT)
    if (version := kind["version"].integer()) not in (VERSION, PARTS_VERSION):
        known = f"{VERSION} and {PARTS_VERSION}"
        raise kind["version"].error(f"{version} is not known; this program reads versions {known}")
    given = isinstance(root.value, dict) and "operator" in root.value
    part = root.fields(
        *(("operator",) if given else ()),
        "format", "version", "name", "world_size", "mask", "q_layout", "kv_layout", "head_groups", "q_pieces",
        "kv_pieces", "keep", "slack", "codecs", "tiles", "moves", "returns",
    )  # fmt: skip
    world = part["world_size"].integer(1)
    q_layout, kv_layout = _layout(part["q_layout"], world), _layout(part["kv_layout"], world)
    if version == VERSION and not (q_layout.is_even and kv_layout.is_even):
        raise kind["version"].error(f"{VERSION} has no chunks that the end cuts; they are of version {PARTS_VERSION}")
    empty = ScheduleData(
        part["name"].name(),
        world,
        q_layout,
        kv_layout,
        _mask(part["mask"], kv_layout.length),
        (),
        (),
        part["head_groups"].integer(1),
        _pieces(part["q_pieces"], q_layout),
        _pieces(part["kv_pieces"], kv_layout),
        frozenset(part["keep"].distinct(lambda node: node.choice("q", "kv"))),
        part["slack"].optional(lambda node: node.integer(0)),
        _codecs(part["codecs"]),
        _operator(part["operator"]) if given else ATTENTION,
    )
    tiles = part["tiles"].each(lambda node: _tile(node, empty))
    optional = ("rows",) if version == PARTS_VERSION else ()
    moves = part["moves"].each(lambda node: _request(node, empty, optional))
    returns = part["returns"].each(lambda node: _return(node, empty, optional))
    # Each list keeps its own order, which verify() checks; a sorted pair gives the total order back.
    return empty.replace(tiles=tuple(tiles), moves=tuple(merge(moves, returns, key=move_order)))


def _operator(node: JsonNode) -> TileOperator:
    from tokenring.ir.operators import OPERATORS

    return OPERATORS[node.choice(*OPERATORS)]


def _mask(node: JsonNode, length: int, depth: int = 0) -> Mask:
    more = isinstance(node.value, dict) and bool(MORE_OF_MASKS & node.value.keys())
    part = node.fields("low", "high", "cu_seqlens", *(sorted(MORE_OF_MASKS) if more else ()))
    if depth > DEEPEST:
        raise node.error(f"more than {DEEPEST} masks stand in each other")
    low, high = (part[key].optional(lambda bound: bound.integer(-INTEGER_LIMIT)) for key in ("low", "high"))
    bounds = part["cu_seqlens"].optional(lambda list_: list_.each(lambda bound: bound.integer(0, length)))
    try:
        mask = Mask(low, high, None if bounds is None else tuple(bounds))
    except ConfigurationError as error:
        raise part["cu_seqlens"].error(str(error)) from None
    return _more(part, mask, length, depth) if more else mask


def _more(part: dict[str, JsonNode], mask: Mask, length: int, depth: int) -> Mask:
    """Return the mask with what the other keys say. Raises ScheduleError."""
    from tokenring.sequence.slices import table_of

    def row(node: JsonNode) -> tuple[int | None, ...]:
        return tuple(node.each(lambda number: number.optional(lambda value: value.integer(-INTEGER_LIMIT))))

    chunks = part["chunks"].each(lambda node: node.integer(1))
    slices = part["slices"].optional(lambda node: node.each(row))
    either = part["either"].each(lambda node: tuple(node.each(lambda each: _mask(each, length, depth + 1))))
    q_start = part["q_start"].optional(lambda node: node.integer())
    try:
        table = None if slices is None else table_of(slices)
        return Mask(mask.low, mask.high, mask.cu_seqlens, tuple(chunks), table, tuple(either), q_start)
    except ConfigurationError as error:
        raise part["slices"].error(str(error)) from None


def _layout(node: JsonNode, world_size: int) -> Layout:
    part = node.fields("name", "length", "chunks")
    name, length = part["name"].name(), part["length"].integer(1)
    pairs = part["chunks"].each(lambda chunk: _chunk(chunk, length, world_size))
    if len(pairs) < world_size:
        raise part["chunks"].error(f"{len(pairs)} chunks are too few for {world_size} ranks")
    try:
        chunks, owners = zip(*pairs, strict=True)
        return Layout(name, world_size, length, chunks, owners)
    except ConfigurationError as error:
        raise node.error(str(error)) from None


def _chunk(node: JsonNode, length: int, world_size: int) -> tuple[Positions, int]:
    part = node.fields("start", "stop", "step", "owner")
    start = part["start"].integer(0)
    positions = Positions(start, part["stop"].integer(start + (start < length)), part["step"].integer(1))
    return positions, part["owner"].index(world_size, "a rank")


def known_layout(name: str, world_size: int, length: int, chunks: int) -> Layout | None:
    """Return the layout that make_layout knows by this name, or None if there is none with so many chunks."""
    cuts = name.partition("/")[2]
    # A name from outside must not make us cut a sequence into more chunks than the document lists.
    if cuts and not (cuts.isascii() and cuts.isdigit() and len(cuts) < 10 and int(cuts) * world_size <= chunks):
        return None
    try:
        layout = make_layout(name, world_size, length)
    except ConfigurationError:
        return None
    return layout if len(layout.chunks) == chunks else None


def _pieces(node: JsonNode, layout: Layout) -> int:
    """Return the number of parts into which each of the layout's chunks is cut. Raises ScheduleError."""
    pieces = node.integer(1)
    if not layout.takes_pieces(pieces):
        raise node.error(f"{pieces} pieces do not divide chunks of {layout.chunk_length} positions")
    return pieces


def _codecs(node: JsonNode) -> tuple[tuple[str, str], ...]:
    def codec(entry: JsonNode) -> tuple[str, str]:
        part = entry.fields("kind", "codec")
        return part["kind"].choice(*KINDS), part["codec"].name()

    codecs = node.each(codec)
    if len(dict(codecs)) < len(codecs):
        raise node.error("a kind stands twice")
    return tuple(codecs)


def _tile(node: JsonNode, schedule: ScheduleData) -> Tile:
    part = node.fields("step", "rank", "heads", "q", "kv")
    heads = part["heads"].index(schedule.head_groups, "a head group")

    def units(kind: Kind) -> tuple[Block, ...]:
        def unit(entry: JsonNode) -> Block:
            return Block(kind, *_unit(entry.fields("chunk", "piece"), kind, schedule, heads))

        blocks = part[kind].each(unit)
        if not blocks:
            raise part[kind].error(f"a tile needs at least one {kind} unit")
        return tuple(blocks)

    rank = part["rank"].index(schedule.world_size, "a rank")
    return Tile(part["step"].integer(0), rank, units("q"), units("kv"))


def _unit(part: dict[str, JsonNode], kind: Kind, schedule: ScheduleData, heads: int) -> tuple[int, int, int]:
    name = "q" if kind.startswith("q") else "kv"
    chunk = part["chunk"].index(len(schedule.layout_of(kind).chunks), f"a {name} chunk")
    return chunk, heads, part["piece"].index(schedule.pieces_of(kind), f"a {name} piece")


def _request(node: JsonNode, schedule: ScheduleData, optional: tuple[str, ...]) -> Move:
    part = node.fields("step", "kind", "chunk", "heads", "piece", "src", "dst", "channel", optional=optional)
    return _move(part, part["kind"].choice("q", "kv"), None, schedule, REQUESTS)


def _return(node: JsonNode, schedule: ScheduleData, optional: tuple[str, ...]) -> Move:
    part = node.fields(
        "step", "kind", "chunk", "heads", "piece", "made_at", "src", "dst", "channel", "add", optional=optional
    )
    made_at = part["made_at"].index(schedule.world_size, "a rank")
    move = _move(part, part["kind"].choice("q_partial", "kv_partial"), made_at, schedule, PARTIALS)
    return move._replace(add=part["add"].boolean())


def _move(part: dict[str, JsonNode], kind: Kind, made_at: int | None, schedule: ScheduleData, channel: str) -> Move:
    heads = part["heads"].index(schedule.head_groups, "a head group")
    block = Block(kind, *_unit(part, kind, schedule, heads), made_at)
    src, dst = (part[end].index(schedule.world_size, "a rank") for end in ("src", "dst"))
    rows = _rows(part["rows"], schedule.unit_length(kind)) if "rows" in part else None
    return Move(part["step"].integer(0), block, src, dst, part["channel"].choice(channel), rows=rows)


def _rows(node: JsonNode, length: int) -> Runs:
    """Return runs of rows of a unit of this length. Raises ScheduleError."""
    runs: list[tuple[int, int]] = []

    def add(entry: JsonNode) -> None:
        run = entry.each(lambda end: end.integer(0, length))
        if len(run) != 2 or not (runs[-1][1] if runs else -1) < run[0] < run[1]:
            raise entry.error(f"is not a run [start, stop] of {length} rows, or not beyond the run before it")
        runs.append((run[0], run[1]))

    node.each(add)
    if not runs or runs == [(0, length)]:
        raise node.error("names no row, or all of them: leave it out for all")
    return tuple(runs)
