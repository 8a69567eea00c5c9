"""Which schedule for which workload. For now: the fewest bytes on the busiest link of a full mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenring.errors import ConfigurationError
from tokenring.layout import Layout
from tokenring.mask import Mask
from tokenring.schedule.families.registry import check_heads, expand
from tokenring.schedule.ir import Pass, Schedule
from tokenring.schedule.schemes import SCHEMES, make_schedule
from tokenring.topology.ranks import Topology
from tokenring.workload import Workload

PIECES_THAT_PAY = (2,)  # measured: more cost more messages than they hide
LEAST_PIECE_BYTES = 1 << 16  # below, a message costs more than its bytes
CUT_BY_DEFAULT = frozenset({"direct-kv", "direct-q"})


@dataclass(frozen=True)
class Candidate:
    """One schedule that was considered, with the bytes of all passes asked for."""

    name: str
    worst_link_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Plan:
    """The chosen schedule, why, and what else there was, best first."""

    schedule: Schedule
    workload: Workload
    reason: str
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        return self.schedule.name


def default_pieces(name: str, workload: Workload, q_layout: Layout, kv_layout: Layout) -> int | None:
    """In how many pieces a named schedule moves its chunks when nobody says: direct ones, where it pays."""
    if name not in CUT_BY_DEFAULT:
        return None
    layout = kv_layout if name == "direct-kv" else q_layout
    heads = 2 * workload.kv_heads if name == "direct-kv" else workload.q_heads
    chunk_bytes = layout.chunk_length * workload.batch * heads * workload.head_dim * workload.itemsize
    for pieces in PIECES_THAT_PAY:
        if layout.chunk_length % pieces == 0 and chunk_bytes // pieces >= LEAST_PIECE_BYTES:
            return pieces
    return 1


def named_schedule(
    name: str, workload: Workload, q_layout: Layout, kv_layout: Layout, mask: Mask, pieces: int | None = None
) -> Schedule:
    """A named schedule for a workload, in its default pieces unless told otherwise."""
    if pieces is None:
        pieces = default_pieces(name, workload, q_layout, kv_layout)
    made = make_schedule(name, q_layout, kv_layout, mask, pieces=pieces)
    check_heads(name, made.head_groups, workload)
    return made


def select(
    workload: Workload,
    topology: Topology,
    *,
    q_layout: Layout,
    kv_layout: Layout,
    mask: Mask,
    passes: Sequence[Pass] = ("forward", "backward"),
    families: Sequence[str] = tuple(SCHEMES),
) -> Plan:
    """The schedule with the fewest bytes on the busiest link over these passes; then the fewest in all.

    Every link of a full mesh counts alike; a topology with known bandwidths weighs them.
    """
    names = expand(families, q_layout.world_size, workload)
    schedules, misfits = {}, []
    for name in names:
        try:
            schedules[name] = named_schedule(name, workload, q_layout, kv_layout, mask)
        except ConfigurationError as error:  # its pieces do not divide the chunks
            misfits.append(error)
    if not schedules:
        raise misfits[0]
    costs = {name: _cost(made, workload, passes) for name, made in schedules.items()}
    ranked = sorted(schedules, key=lambda name: (*costs[name], names.index(name)))
    candidates = tuple(Candidate(name, *costs[name]) for name in ranked)
    best = ranked[0]
    return Plan(schedules[best], workload, _reason(candidates, topology, passes), candidates)


def _cost(schedule: Schedule, workload: Workload, passes: Sequence[Pass]) -> tuple[int, int]:
    links: dict[tuple[int, int], int] = {}
    for direction in passes:
        for link, carried in schedule.link_bytes(workload, direction).items():
            links[link] = links.get(link, 0) + carried
    return max(links.values(), default=0), sum(links.values())


def _reason(candidates: Sequence[Candidate], topology: Topology, passes: Sequence[Pass]) -> str:
    best = candidates[0]
    if best.total_bytes == 0:
        return "nothing has to move"
    text = f"fewest bytes on the busiest link of a {topology.name} ({' + '.join(passes)}): {_mb(best.worst_link_bytes)}"
    if len(candidates) > 1:
        second = candidates[1]
        text += f"; next {second.name} with {_mb(second.worst_link_bytes)}"
    return text


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"
