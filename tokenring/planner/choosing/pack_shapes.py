"""Shapes of packs: masks that differ in where their documents end, and are alike for every schedule.

New documents each step are the normal case of training, and planning takes longer than a step. What a schedule takes
depends on how much work there is, how even it is, and how many rows the busiest port moves: packs that are alike in
these are planned once, and the schedule is made anew for each.
"""

from __future__ import annotations

from collections.abc import Hashable

from tokenring.planner.layouts.assignment import Assignment
from tokenring.planner.layouts.demand import demand_of
from tokenring.sequence.layout import Layout
from tokenring.sequence.workload import Request

GRAINS = 4  # of rows in a chunk
STEPS_OF_BALANCE = 8  # between even work and twice as much on one rank


def pack_shape(request: Request, layouts: tuple[Layout, Layout]) -> Hashable:
    """Return what packs have in common that one plan serves; None where each mask is planned by itself.

    All measures are integers, so that all ranks find the same.
    """
    q_layout, kv_layout = layouts
    mask, layout = request.mask, q_layout
    aside = q_layout.length % (len(q_layout.chunks) * GRAINS) or any(chunk.step != 1 for chunk in q_layout.chunks)
    if mask.is_window or q_layout != kv_layout or aside:
        return None
    demand = demand_of(mask, layout.length, len(layout.chunks), GRAINS)
    found = Assignment(demand, layout.owners, layout.world_size, float("inf"))
    work = sum(found.loads)
    uneven = STEPS_OF_BALANCE * layout.world_size * max(found.loads) // max(1, work)
    call = request.workload, request.backward, request.device, request.softcap
    return *call, layout.name, _half_octave(work), uneven, _half_octave(found.busiest_port)


def _half_octave(count: int) -> int:
    """Return a number's place among steps of a half octave, by its first two bits."""
    return 2 * count.bit_length() + (count >> max(0, count.bit_length() - 2) & 1)
