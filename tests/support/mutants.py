"""Schedules with one thing wrong, and what verify must say of each.

A kind is a function from a proved schedule to mutants of it: one for every place where that can go
wrong. All keep to the total order of moves, so that they are refused for what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

from mutant_edits import (
    HELD,
    NEEDLESS,
    NEVER_HOME,
    NOT_HELD,
    NOTHING,
    Kind,
    Mutant,
    all_visible,
    another_move,
    another_tile,
    later,
    makers,
    of,
    others,
    partials,
    replace_move,
    replace_tile,
    requests,
    steps,
)

from tokenring.ir.schedule_data import PARTIALS, REQUESTS, Block, Move, Tile
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import Layout

# ---------- tiles


def dropped_tile(schedule: Schedule) -> Iterator[Mutant]:
    says = f"{NOTHING}|{NEEDLESS}|never meets kv"
    for tile in schedule.tiles:
        blocks = of(tile) | {block.partial(tile.rank) for block in of(tile)}
        ranks = {tile.rank} | {schedule.owner(block) for block in tile.q}
        yield Mutant(replace_tile(schedule, tile), steps(), ranks, blocks, says)


def duplicated_tile(schedule: Schedule) -> Iterator[Mutant]:
    for tile in schedule.tiles:
        yield Mutant(
            replace_tile(schedule, tile, tile, tile), {tile.step}, {tile.rank}, set(tile.q), "with kv.* a second time"
        )


def tile_computed_twice_over_time(schedule: Schedule) -> Iterator[Mutant]:
    last = later(schedule)
    for tile in schedule.tiles:
        if all(schedule.owner(block) == tile.rank for block in of(tile)):
            again = tile._replace(step=last)
            yield Mutant(replace_tile(schedule, tile, tile, again), {last}, {tile.rank}, set(tile.q), "a second time")


def tile_at_a_rank_that_lacks_a_block(schedule: Schedule) -> Iterator[Mutant]:
    held = {(move.block, move.dst) for move in requests(schedule)}
    for tile in schedule.tiles:
        for rank in others(schedule, tile.rank):
            lacks = {b for b in of(tile) if schedule.owner(b) != rank and (b, rank) not in held}
            if lacks:
                mutant = replace_tile(schedule, tile, tile._replace(rank=rank))
                # A partial that this tile made may be sent before the tile's new place is reached.
                partial = {b.partial(tile.rank) for b in of(tile)}
                yield Mutant(mutant, steps(), {rank, tile.rank}, of(tile) | partial, f"{NOT_HELD}|{NOTHING}")


def tile_before_its_blocks(schedule: Schedule) -> Iterator[Mutant]:
    arrival = {(move.block, move.dst): move.step for move in requests(schedule)}
    for tile in schedule.tiles:
        come = {b: arrival[b, tile.rank] for b in of(tile) if (b, tile.rank) in arrival}
        if come:
            step = max(come.values())
            blocks = {b for b, at in come.items() if at == step}
            mutant = replace_tile(schedule, tile, tile._replace(step=step))
            yield Mutant(mutant, {step}, {tile.rank}, blocks, NOT_HELD)


def hidden_tile(schedule: Schedule) -> Iterator[Mutant]:
    for q in range(len(schedule.q_layout.chunks)):
        for kv in range(len(schedule.kv_layout.chunks)):
            tile = Tile(0, schedule.q_layout.owners[q], (Block("q", q),), (Block("kv", kv),))
            if schedule.kv_layout.owners[kv] == tile.rank and not schedule.mask.visible(
                schedule.positions(tile.q[0]), schedule.positions(tile.kv[0])
            ):
                yield Mutant(another_tile(schedule, tile), {0}, {tile.rank}, {tile.q[0]}, "sees nothing in its tile")


def hidden_block_in_a_tile(schedule: Schedule) -> Iterator[Mutant]:
    """A tile in two, one of which has a kv block that only the other sees."""
    for tile in schedule.tiles:
        for q in tile.q[:-1]:
            rest = tuple(block for block in tile.q if block != q)
            hidden = {kv for kv in tile.kv if not schedule.mask.visible(schedule.positions(q), schedule.positions(kv))}
            if hidden and len(hidden) < len(tile.kv):
                mutant = replace_tile(schedule, tile, tile._replace(q=(q,)), tile._replace(q=rest))
                yield Mutant(mutant, {tile.step}, {tile.rank}, hidden, "which the mask hides from its tile")


def tile_after_its_partial_was_sent(schedule: Schedule) -> Iterator[Mutant]:
    """A tile in two, the second after the first one's partial has gone."""
    gone = {(move.block, move.src): move.step for move in partials(schedule)}
    for tile in schedule.tiles:
        made = {b.partial(tile.rank) for b in of(tile) if (b.partial(tile.rank), tile.rank) in gone}
        if made and len(tile.q) > 1 and len(tile.kv) > 1 and all_visible(schedule, tile):
            step = later(schedule)
            halves = [
                [tile._replace(q=tile.q[:1]), tile._replace(q=tile.q[1:], step=step)],
                [tile._replace(kv=tile.kv[:1]), tile._replace(kv=tile.kv[1:], step=step)],
            ]
            for half in halves:
                says = f"adds to .* after it was sent|{NOTHING}"
                yield Mutant(replace_tile(schedule, tile, *half), steps(min(gone[b, tile.rank] for b in made)),
                             {tile.rank}, made, says)  # fmt: skip


def swapped_q_and_kv(schedule: Schedule) -> Iterator[Mutant]:
    for tile in schedule.tiles:
        mutant = replace_tile(schedule, tile, tile._replace(q=tile.kv, kv=tile.q))
        yield Mutant(mutant, {tile.step}, {tile.rank}, set(tile.kv), "among its q blocks")


def block_twice_in_a_tile(schedule: Schedule) -> Iterator[Mutant]:
    for tile in schedule.tiles:
        mutant = replace_tile(schedule, tile, tile._replace(q=(*tile.q, tile.q[0])))
        yield Mutant(mutant, {tile.step}, {tile.rank}, {tile.q[0]}, "names a q block twice")


# ---------- requests


def dropped_request(schedule: Schedule) -> Iterator[Mutant]:
    for move in requests(schedule):
        yield Mutant(replace_move(schedule, move), steps(move.step + 1), {move.dst}, {move.block}, NOT_HELD)


def request_sent_again(schedule: Schedule) -> Iterator[Mutant]:
    for move in requests(schedule):
        again = move._replace(step=later(schedule))
        yield Mutant(replace_move(schedule, move, move, again), {again.step}, {move.dst}, {move.block}, HELD)


def request_to_a_rank_that_holds_it(schedule: Schedule) -> Iterator[Mutant]:
    for move in requests(schedule):
        back = move._replace(step=later(schedule), src=move.dst, dst=schedule.owner(move.block))
        yield Mutant(replace_move(schedule, move, move, back), {back.step}, {back.dst}, {move.block}, HELD)


def needless_request(schedule: Schedule) -> Iterator[Mutant]:
    """To a rank that would hold it for nothing."""
    held = {(move.block, move.dst) for move in requests(schedule)}
    for tile in schedule.tiles:
        for block in (tile.q[-1], tile.kv[-1]):
            for rank in others(schedule, schedule.owner(block)):
                if (block, rank) not in held:
                    extra = Move(later(schedule), block, schedule.owner(block), rank, REQUESTS)
                    yield Mutant(another_move(schedule, extra), {extra.step}, {rank}, {block}, NEEDLESS)


def misrouted_request(schedule: Schedule) -> Iterator[Mutant]:
    for move in requests(schedule):
        for rank in others(schedule, move.src, move.dst):
            mutant = replace_move(schedule, move, move._replace(dst=rank))
            says = f"{NOT_HELD}|{HELD}|or twice"
            yield Mutant(mutant, steps(move.step), {rank, move.dst, move.src}, {move.block}, says)


def early_request(schedule: Schedule) -> Iterator[Mutant]:
    arrival = {(move.block, move.dst): move.step for move in requests(schedule)}
    for move in requests(schedule):
        step = arrival.get((move.block, move.src))
        if step is not None:
            mutant = replace_move(schedule, move, move._replace(step=step))
            yield Mutant(mutant, {step}, {move.src}, {move.block}, NOT_HELD)


def ghost_request(schedule: Schedule) -> Iterator[Mutant]:
    """A block that its sender never gets."""
    held = {(move.block, move.dst) for move in requests(schedule)}
    for tile in schedule.tiles:
        for block in (tile.q[0], tile.kv[0]):
            for rank in others(schedule, schedule.owner(block)):
                if (block, rank) not in held:
                    ghost = Move(later(schedule), block, rank, others(schedule, rank)[0], REQUESTS)
                    yield Mutant(another_move(schedule, ghost), {ghost.step}, {rank}, {block}, NOT_HELD)


# ---------- partials


def dropped_partial(schedule: Schedule) -> Iterator[Mutant]:
    """Of what several ranks have added up, any may be named."""
    for move in partials(schedule):
        ranks = set(range(schedule.world_size))
        blocks = {move.block._replace(made_at=rank) for rank in ranks}
        yield Mutant(replace_move(schedule, move), steps(), ranks, blocks, f"{NEVER_HOME}|{NOTHING}")


def partial_before_its_tile(schedule: Schedule) -> Iterator[Mutant]:
    for move in partials(schedule):
        first = min((tile.step for tile in makers(schedule, move)), default=0)
        if first > 0 and move.block._replace(made_at=None) not in {
            m.block._replace(made_at=None) for m in schedule.moves if m.add
        }:
            mutant = replace_move(schedule, move, move._replace(step=first - 1))
            yield Mutant(mutant, {first - 1}, {move.src}, {move.block}, NOTHING)


def partial_sent_twice(schedule: Schedule) -> Iterator[Mutant]:
    """Once more to where it went, and once to another rank."""
    for move in partials(schedule):
        owner = schedule.owner(move.block)
        for dst in (move.dst, *others(schedule, move.src, move.dst, owner)[:1]):
            again = move._replace(step=later(schedule), dst=dst)
            mutant = replace_move(schedule, move, move, again)
            yield Mutant(mutant, {again.step}, {move.src}, {move.block}, "a second time")


def partial_to_another_rank(schedule: Schedule) -> Iterator[Mutant]:
    for move in partials(schedule):
        for rank in others(schedule, move.src, move.dst, schedule.owner(move.block)):
            mutant = replace_move(schedule, move, move._replace(dst=rank, add=False))
            ranks = set(range(schedule.world_size))
            blocks = {move.block._replace(made_at=each) for each in ranks}
            yield Mutant(mutant, steps(), ranks, blocks, f"{NEVER_HOME}|{NOTHING}")


def partial_never_made(schedule: Schedule) -> Iterator[Mutant]:
    """Sent home by a rank that computed nothing for it."""
    made = {(block, tile.rank) for tile in schedule.tiles for block in of(tile)}
    for tile in schedule.tiles:
        for rank in others(schedule, schedule.owner(tile.q[0])):
            if (tile.q[0], rank) not in made and not any(move.add for move in schedule.moves):
                block = tile.q[0].partial(rank)
                ghost = Move(later(schedule), block, rank, schedule.owner(block), PARTIALS)
                yield Mutant(another_move(schedule, ghost), {ghost.step}, {rank}, {block}, NOTHING)


def added_after_the_relay_has_sent(schedule: Schedule) -> Iterator[Mutant]:
    sent = {(move.block, move.src): move.step for move in partials(schedule)}
    for move in partials(schedule):
        target = move.block._replace(made_at=move.dst)
        if move.add and any(target.request() in of(tile) for tile in schedule.tiles if tile.rank == move.dst):
            late = move._replace(step=sent[target, move.dst] + 1)
            mutant = replace_move(schedule, move, late)
            yield Mutant(mutant, {late.step}, {move.dst}, {target}, "adds .* after that was sent")


def added_while_the_relay_sends(schedule: Schedule) -> Iterator[Mutant]:
    """In one step: whichever stands first, the relay cannot have it in time."""
    sent = {(move.block, move.src): move.step for move in partials(schedule)}
    for move in partials(schedule):
        target = move.block._replace(made_at=move.dst)
        if move.add:
            late = move._replace(step=sent[target, move.dst])
            mutant = replace_move(schedule, move, late)
            says = f"adds .* after that was sent|before what is added to it has come|{NOTHING}"
            yield Mutant(mutant, {late.step}, {move.dst}, {target}, says)


# ---------- form


def swapped_order(schedule: Schedule) -> Iterator[Mutant]:
    moves = schedule.moves
    for at, (first, second) in enumerate(pairwise(moves)):
        mutant = partial(schedule.replace, moves=(*moves[:at], second, first, *moves[at + 2 :]))
        yield Mutant(mutant, {first.step}, {first.src}, {first.block}, "stands behind .* against the order")


def move_listed_twice(schedule: Schedule) -> Iterator[Mutant]:
    for move in schedule.moves:
        mutant = replace_move(schedule, move, move, move)
        yield Mutant(mutant, {move.step}, {move.src}, {move.block}, "stands behind .*, or twice")


def wrong_channel(schedule: Schedule) -> Iterator[Mutant]:
    for move in schedule.moves:
        for channel in {REQUESTS, PARTIALS, "both"} - {move.channel}:
            mutant = replace_move(schedule, move, move._replace(channel=channel))
            yield Mutant(mutant, {move.step}, {move.src}, {move.block}, f"cannot travel on channel '{channel}'")


def out_of_range_rank(schedule: Schedule) -> Iterator[Mutant]:
    for bad in (-1, schedule.world_size):
        says = f"{bad} is not a rank of {schedule.world_size}"
        for move in schedule.moves:
            mutant = replace_move(schedule, move, move._replace(dst=bad))
            yield Mutant(mutant, {move.step}, {move.src}, {move.block}, says)


def out_of_range_block(schedule: Schedule) -> Iterator[Mutant]:
    for move in schedule.moves:
        for bad in (
            move.block._replace(chunk=len(schedule.layout_of(move.block.kind).chunks)),
            move.block._replace(heads=schedule.head_groups),
            move.block._replace(piece=schedule.pieces_of(move.block.kind)),
        ):
            mutant = replace_move(schedule, move, move._replace(block=bad))
            yield Mutant(mutant, {move.step}, {move.src}, {bad}, f"there is no block {bad}$")


def sent_to_itself(schedule: Schedule) -> Iterator[Mutant]:
    for move in schedule.moves:
        mutant = replace_move(schedule, move, move._replace(dst=move.src))
        yield Mutant(mutant, {move.step}, {move.src}, {move.block}, "a rank sends to itself")


def added_where_it_must_not_be(schedule: Schedule) -> Iterator[Mutant]:
    """Requests are never added, and the owner merges."""
    for move in schedule.moves:
        if not move.add and (move.channel == REQUESTS or move.dst == schedule.owner(move.block)):
            mutant = replace_move(schedule, move, move._replace(add=True))
            yield Mutant(mutant, {move.step}, {move.src}, {move.block}, "add is for partials on their way")


def partial_of_nobody(schedule: Schedule) -> Iterator[Mutant]:
    """Partials say where they were made, requests do not."""
    for move in schedule.moves:
        bad = move.block._replace(made_at=0 if move.block.made_at is None else None)
        mutant = replace_move(schedule, move, move._replace(block=bad))
        yield Mutant(mutant, {move.step}, {move.src}, {bad}, "cannot travel on channel")


# ---------- layouts


def chunks_of_each_other(schedule: Schedule) -> Iterator[Mutant]:
    """Two ranks own a chunk of each other, where tiles and moves are as before: each chunk has an owner too many."""
    blocks = {block for tile in schedule.tiles for block in (*tile.q, *tile.kv)} | {m.block for m in schedule.moves}
    says = f"{NOT_HELD}|{HELD}|{NEVER_HOME}|{NOTHING}|not for requests or the owner"
    for name, kinds in (("q_layout", ("q", "q_partial")), ("kv_layout", ("kv", "kv_partial"))):
        layout: Layout = getattr(schedule, name)
        for pair in pairwise(range(len(layout.owners))):
            owners = list(layout.owners)
            owners[pair[0]], owners[pair[1]] = owners[pair[1]], owners[pair[0]]
            if tuple(owners) == layout.owners:
                continue
            make = partial(schedule.replace, **{name: replace(layout, name="other", owners=tuple(owners))})
            named = {block for block in blocks if block.kind in kinds and block.chunk in pair}
            yield Mutant(make, steps(), set(range(schedule.world_size)), named, says)


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        dropped_tile, duplicated_tile, tile_computed_twice_over_time, tile_at_a_rank_that_lacks_a_block,
        tile_before_its_blocks, hidden_tile, hidden_block_in_a_tile, tile_after_its_partial_was_sent,
        swapped_q_and_kv, block_twice_in_a_tile, dropped_request, request_sent_again,
        request_to_a_rank_that_holds_it, needless_request, misrouted_request, early_request, ghost_request,
        dropped_partial,
        partial_before_its_tile, partial_sent_twice, partial_to_another_rank, partial_never_made,
        added_after_the_relay_has_sent, added_while_the_relay_sends, swapped_order, move_listed_twice,
        wrong_channel, out_of_range_rank, out_of_range_block, sent_to_itself, added_where_it_must_not_be,
        partial_of_nobody, chunks_of_each_other,
    )
}  # fmt: skip
