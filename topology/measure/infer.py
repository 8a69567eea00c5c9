"""The decision which shape the tables show. It may take more races, which all ranks run alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tokenring.topology.measure.islands import find_islands, model_of_islands
from tokenring.topology.measure.lab import Lab
from tokenring.topology.measure.model import Model, check
from tokenring.topology.measure.rings import find_ring
from tokenring.topology.measure.shapes import mesh_model, ring_model, switch_model
from tokenring.topology.measure.survey import Tables

FREE = 0.85  # of the rate alone: not slowed down
ALIKE = 0.7  # alone: the slowest of the fastest
ALL_LINKS, ONE_PORT = 0.75, 1.3  # one to all: of the sum of all links; of one link
TWO_LINKS = (1.25, 2.4)  # one to all on a ring, of one link; the side with more ranks ends last


def infer(tables: Tables, lab: Lab) -> Model:
    """Infer the shape, and check it by one more race."""
    model = _infer(tables, lab)
    check(model, lab)
    return model


def _infer(tables: Tables, lab: Lab) -> Model:
    ranks = tables.ranks
    if ranks == 2:
        return mesh_model(tables, "two ranks and what is between them")
    everyone = range(ranks)
    slowed = [(a, b) for a in everyone for b in everyone if a < b and tables.slowed(a, b, FREE)]
    shares = [tables.out[rank] / statistics.median(tables.alone.values()) for rank in everyone]
    alike = min(tables.alone.values()) >= ALIKE * tables.best()
    may_be_ring = alike and ranks > 3 and TWO_LINKS[0] <= statistics.median(shares) <= TWO_LINKS[1]
    if may_be_ring and (ring := find_ring(tables, lab)) is not None:
        return ring_model(tables, ring)
    if (whole := _mesh_or_switch(tables, slowed)) is not None:
        return whole
    if (islands := find_islands(tables, lab, FREE)) is not None:
        return model_of_islands(tables, lab, islands)
    return _unknown(tables, slowed)


def _mesh_or_switch(tables: Tables, slowed: Sequence[tuple[int, int]]) -> Model | None:
    """Tell links of their own from one port by what one rank sends to all at once; return None for neither.

    All links at once are a mesh, even if something else slowed some pairs down. One port may also lead to islands.
    """
    everyone = range(tables.ranks)
    links = [tables.out[r] / sum(tables.alone[r, other] for other in everyone if other != r) for r in everyone]
    port = [tables.out[r] / max(tables.alone[r, other] for other in everyone if other != r) for r in everyone]
    sends = f"a rank sends to all {tables.ranks - 1} others at once"
    if statistics.median(links) >= ALL_LINKS:
        model = mesh_model(tables, f"{sends} {statistics.median(port):.1f} times what it sends to one")
    elif not slowed and statistics.median(port) <= ONE_PORT:
        model = switch_model(tables, f"{sends} no more than to one, and pairs do not slow each other down")
    elif not slowed and min(port) > ONE_PORT:
        text = f"{sends} {min(port):.1f} to {max(port):.1f} times what it sends to one"
        model = switch_model(tables, f"{text}: a port wider than one pair can fill", tables.out)
    else:
        return None
    into = statistics.median(tables.into.values()) / statistics.median(tables.out.values())
    if not 1 / ONE_PORT <= into <= ONE_PORT:
        model.doubts.append(f"a rank receives from all at once {into:.2f} times what it sends to all")
    if slowed:
        model.doubts.append(f"{len(slowed)} pairs were slowed down when others were at work")
    return model


def _unknown(tables: Tables, slowed: Sequence[tuple[int, int]]) -> Model:
    pairs = tables.ranks * (tables.ranks - 1) // 2
    text = f"{len(slowed)} of {pairs} pairs slow down when others are at work, in no pattern that is known here"
    if len(slowed) == pairs:
        at_once = sum(tables.coloured.values()) / (tables.ranks - 1)
        text = f"every pair slows down when others are at work: all share {at_once:.3g} GB/s or so"
    return Model(tables.ranks, doubts=[text])
