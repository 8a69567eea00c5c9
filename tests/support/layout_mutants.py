"""Schedules whose layout says another owner of a chunk than tiles and moves do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

from mutants import HELD, NEVER_HOME, NOT_HELD, NOTHING, Mutant, steps

from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import Layout


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
