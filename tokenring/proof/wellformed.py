"""The form of a schedule: what its tiles and moves name exists, and they stand in their total order."""

from __future__ import annotations

from itertools import pairwise

from tokenring.errors import ConfigurationError, ScheduleError
from tokenring.ir.passes import move_order, tile_order
from tokenring.ir.schedule_data import (
    KINDS,
    PARTIALS,
    REQUESTS,
    Block,
    Kind,
    Move,
    ScheduleData,
    Tile,
)
from tokenring.sequence.layout import check_partition


def check_form(schedule: ScheduleData) -> None:
    """Raise ScheduleError unless layouts and mask fit, and tiles and moves are of the form that they must have."""
    _check_units(schedule)
    _check_mask(schedule)
    known: set[Block] = set()  # blocks that there are: most stand in many tiles and moves
    for tile in schedule.tiles:
        _check_tile(schedule, tile, known)
    ranks, owners = range(schedule.world_size), {kind: schedule.layout_of(kind).owners for kind in KINDS}
    channels = {kind: PARTIALS if kind.endswith("partial") else REQUESTS for kind in KINDS}
    for move in schedule.moves:
        step, block, src, dst, channel, add, rows = move
        partial = block.made_at is not None
        if (
            step < 0
            or src not in ranks
            or dst not in ranks
            or src == dst
            or (block not in known and not _exists(schedule, block, known))
            or channel != channels[block.kind]
            or partial != (channel == PARTIALS)
            or (add and (not partial or owners[block.kind][block.chunk] == dst))
            or (rows is not None and not _are_runs(rows, schedule.rows(block)))
        ):
            raise _wrong_move(schedule, move)
    if schedule.operator.pairs is not None:
        from tokenring.proof.paired import check_paired

        check_paired(schedule)
    if list(schedule.tiles) != sorted(schedule.tiles, key=tile_order):
        raise ScheduleError(f"{schedule.name}: its tiles are not in order of step, rank and blocks")
    places = list(map(move_order, schedule.moves))
    if not all(before < after for before, after in pairwise(places)):
        raise _wrong_order(schedule)


def _check_units(schedule: ScheduleData) -> None:
    """Raise ScheduleError unless units are equal parts of the sequence that together are all of it."""
    kinds: tuple[Kind, ...] = ("q", "kv")
    for kind in kinds:
        layout, pieces = schedule.layout_of(kind), schedule.pieces_of(kind)
        if layout.world_size != schedule.world_size:
            raise ScheduleError(
                f"{schedule.name}: its {kind} layout is for {layout.world_size} ranks, not {schedule.world_size}"
            )
        if not layout.takes_pieces(pieces):
            raise ScheduleError(
                f"{schedule.name}: {pieces} pieces do not divide {kind} chunks of {layout.chunk_length} positions"
            )
        try:
            check_partition(layout)
        except ConfigurationError as error:
            raise ScheduleError(f"{schedule.name}: {error}") from None
    if not schedule.keep <= set(kinds) or (schedule.slack is not None and schedule.slack < 0):
        raise ScheduleError(f"{schedule.name}: keep is for q and kv, and slack is not negative")
    if schedule.codecs:
        from tokenring.proof.encodings import check_codecs

        check_codecs(schedule)


def _check_mask(schedule: ScheduleData) -> None:
    """Raise ScheduleError if the mask speaks of positions that there are not."""
    q_length, kv_length = schedule.q_layout.length, schedule.kv_layout.length
    if schedule.mask.needs_equal_lengths and q_length != kv_length:
        raise ScheduleError(
            f"{schedule.name}: mask {schedule.mask} compares positions of one sequence, "
            f"but there are {q_length} of q and {kv_length} of kv; use Full()"
        )
    try:
        schedule.mask.check_lengths(q_length, kv_length)
    except ConfigurationError as error:
        raise ScheduleError(f"{schedule.name}: {error}") from None


def _check_tile(schedule: ScheduleData, tile: Tile, known: set[Block]) -> None:
    where = f"{schedule.name}: step {tile.step}, rank {tile.rank}: tile"
    if not tile.q or not tile.kv:
        raise ScheduleError(f"{where} has no q or no kv block")
    _check_place(schedule, where, tile.step, (tile.rank,))
    heads = tile.heads
    for kind, blocks in (("q", tile.q), ("kv", tile.kv)):
        for block in blocks:
            if block not in known and not _exists(schedule, block, known):
                raise ScheduleError(f"{where}: there is no block {block}")
            if block.kind != kind or block.heads != heads:
                raise ScheduleError(f"{where} has {block} among its {kind} blocks of head group {heads}")
        if len(set(blocks)) != len(blocks):
            raise ScheduleError(f"{where} names a {kind} block twice: {', '.join(map(str, blocks))}")


def _wrong_move(schedule: ScheduleData, move: Move) -> ScheduleError:
    """Return an error that says what is wrong with a move."""
    where = f"{schedule.name}: step {move.step}, rank {move.src}: {move.block} to rank {move.dst}"
    _check_place(schedule, where, move.step, (move.src, move.dst))
    if not _exists(schedule, move.block, set()):
        return ScheduleError(f"{where}: there is no block {move.block}")
    if move.src == move.dst:
        return ScheduleError(f"{where}: a rank sends to itself")
    partial = move.block.made_at is not None
    if partial != move.block.kind.endswith("partial") or move.channel != (PARTIALS if partial else REQUESTS):
        return ScheduleError(f"{where} cannot travel on channel {move.channel!r}")
    if move.add and (not partial or schedule.owner(move.block) == move.dst):
        return ScheduleError(f"{where}: add is for partials on their way, not for requests or the owner")
    length = schedule.rows(move.block)
    return ScheduleError(
        f"{where}: its rows are {move.rows}; give runs (start, stop) of the {length} rows of a unit, in order and "
        f"apart from each other, or None for all"
    )


def _are_runs(rows: object, length: int) -> bool:
    """Return whether these are runs of rows of a unit: in order, apart from each other, and not the whole of it."""
    if not isinstance(rows, tuple) or not rows or rows == ((0, length),):
        return False
    at = -1
    for run in rows:
        if not isinstance(run, tuple) or len(run) != 2 or not all(type(row) is int for row in run):
            return False
        if not at < run[0] < run[1] <= length:
            return False
        at = run[1]
    return True


def _wrong_order(schedule: ScheduleData) -> ScheduleError:
    for before, after in pairwise(schedule.moves):
        if move_order(before) >= move_order(after):
            break
    return ScheduleError(
        f"{schedule.name}: step {after.step}, rank {after.src}: {after.block} to rank {after.dst} stands "
        f"behind {before.block} of step {before.step}, or twice, against the order that both ends share"
    )


def _check_place(schedule: ScheduleData, where: str, step: int, ranks: tuple[int, ...]) -> None:
    if step < 0:
        raise ScheduleError(f"{where}: there is no step {step}")
    for rank in ranks:
        if not 0 <= rank < schedule.world_size:
            raise ScheduleError(f"{where}: {rank} is not a rank of {schedule.world_size}")


def _exists(schedule: ScheduleData, block: Block, known: set[Block]) -> bool:
    """Return whether there is such a block; then it is known from now on."""
    fits = (
        block.kind in KINDS
        and 0 <= block.chunk < len(schedule.layout_of(block.kind).chunks)
        and 0 <= block.heads < schedule.head_groups
        and 0 <= block.piece < schedule.pieces_of(block.kind)
        and (block.made_at is None or 0 <= block.made_at < schedule.world_size)
    )
    if fits:
        known.add(block)
    return fits
