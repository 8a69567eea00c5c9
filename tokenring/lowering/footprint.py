"""The cost of a schedule: bytes on each link, bytes of buffers, floating-point operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tokenring.ir.schedule_data import (
    ATTENTION,
    PARTIALS,
    PASSES,
    REQUEST_OF,
    REQUESTS,
    Kind,
    Pass,
    ScheduleData,
    TileOperator,
)
from tokenring.lowering.calls import Supports
from tokenring.lowering.lower import lower
from tokenring.lowering.mailboxes import lay
from tokenring.lowering.program import (
    ALL_GATHER,
    BUNDLE,
    Program,
    Recv,
    Send,
    bundled_bytes,
    landing_slots,
    message_bytes,
)
from tokenring.lowering.records import Records, aligned, check_workload, scratch_bytes, slot_bytes
from tokenring.lowering.target import Contacts, Link, Target, contacts
from tokenring.sequence.workload import Workload


def flops_per_pair(direction: Pass, head_dim: int, value_dim: int, operator: TileOperator = ATTENTION) -> int:
    """Return the flops of a visible pair and query head: attention's are two and five products of 2 flops an element.

    Forward: QKᵀ and PV. Backward: QKᵀ again, dQ and dK, as wide as keys; dOVᵀ and dV, as wide as values. A linear
    layer's are one product and two.
    """
    of_width, of_values = operator.flops[direction]
    return of_width * head_dim + of_values * value_dim


def expanding_flops(workload: Workload, direction: Pass, tokens: int) -> int:
    """Return at most how many operations expand the latents of so many tokens of each batch entry, for all heads.

    Backward expands them once more, and contracts the gradients to those of latents and of the weight.
    """
    elements = (workload.latent_dim or 0) * workload.q_heads * workload.qo_dim
    return {"forward": 2, "backward": 6}[direction] * workload.batch * tokens * elements


FLOPS_PER_PAIR = {each: flops_per_pair(each, 1, 1) for each in PASSES}  # and element, where all are equally wide


def link_bytes(schedule: ScheduleData, workload: Workload, direction: Pass = "forward") -> dict[tuple[int, int], int]:
    """Return the payload bytes of each (source, destination) that carries any in this pass."""
    links: dict[tuple[int, int], int] = defaultdict(int)
    for src, dst, _, nbytes in _bytes_of_kinds(schedule, workload, direction):
        links[src, dst] += nbytes
    return dict(sorted(links.items()))


def channel_bytes(schedule: ScheduleData, workload: Workload, direction: Pass = "forward") -> dict[Link, int]:
    """Return the payload bytes of each link, by channel, that carries any in this pass."""
    found: dict[Link, int] = defaultdict(int)
    for src, dst, kind, nbytes in _bytes_of_kinds(schedule, workload, direction):
        found[src, dst, PARTIALS if kind in REQUEST_OF else REQUESTS] += nbytes
    return found


def _bytes_of_kinds(
    schedule: ScheduleData, workload: Workload, direction: Pass
) -> Iterator[tuple[int, int, Kind, int]]:  # fmt: skip
    records = Records(schedule, workload, direction)
    rows = _even_rows(schedule, direction) or _moved_rows(schedule, direction)
    of_row = {key: records(*key).nbytes for key in {each[2:] for each in rows}}
    for (src, dst, kind, precise), count in rows.items():
        yield src, dst, kind, count * of_row[kind, precise]


def _moved_rows(schedule: ScheduleData, direction: Pass) -> dict[tuple[int, int, Kind, bool], int]:
    """Return the rows of a pass's moves, by source, destination, kind and whether they go in full precision."""
    rows: dict[tuple[int, int, Kind, bool], int] = defaultdict(int)
    moves = schedule.moves_in(direction)
    counts = map(schedule.moved_rows, moves) if schedule.cuts_rows else map(schedule.rows, (move[1] for move in moves))
    full = schedule.in_full_precision
    for move, count in zip(moves, counts, strict=True):
        rows[move[2], move[3], move[1][0], full(move)] += count
    return rows


def _even_rows(schedule: ScheduleData, direction: Pass) -> dict[tuple[int, int, Kind, bool], int] | None:
    """Return the same where whole units move that are all as long, none in full precision: counted; else None."""
    if schedule.cuts_rows or schedule.any_adds or schedule.codecs:
        return None
    if not (schedule.q_layout.is_even and schedule.kv_layout.is_even):
        return None
    lengths = {kind: schedule.unit_length(kind) for kind in schedule.moving(direction)}
    counted = schedule.moves_by_pair.items()
    return {(src, dst, kind, False): n * lengths[kind] for (src, dst, kind), n in counted if kind in lengths}


def connections(some: Iterable[Link], target: Target, rank: int) -> int:
    """Return how many connections a transport makes at a rank for these links: communicators of two ranks, in HCCL.

    With batching they are of all ranks: one for each channel, at every rank.
    """
    if target.batching:
        return len({channel for _, _, channel in some})
    found = {
        (
            dst if src == rank else src,
            channel if target.channels > 1 else "",
            not target.pair_serial and src < dst,
        )
        for src, dst, channel in some
        if rank in (src, dst)
    }
    return len(found)


def connections_by_rank(some: Iterable[Link], target: Target, world_size: int) -> list[int]:
    """Return how many `connections` each rank has, in one go over the links of all."""
    if target.batching:
        return [connections(some, target, 0)] * world_size
    found: list[set[tuple[int, str, bool]]] = [set() for _ in range(world_size)]
    for src, dst, channel in some:
        lane, up = channel if target.channels > 1 else "", not target.pair_serial and src < dst
        found[src].add((dst, lane, up))
        found[dst].add((src, lane, up))
    return [len(each) for each in found]


def most_connected(schedule: ScheduleData, target: Target, passes: Iterable[Pass] = PASSES) -> int:
    """Return the number of connections of the rank that has most: of pairs, and of more ranks."""
    used = contacts(schedule, target, passes)
    made = connections_by_rank(used.links, target, schedule.world_size)
    return max(made[rank] + sum(rank in ranks for ranks in used.groups) for rank in range(schedule.world_size))


class HeldBytes(NamedTuple):
    """Bytes and connections of the ranks that have most.

    Of the rank that holds most: bytes with its connections; of the one whose connections take most: their number,
    those of more than two ranks with them, and bytes.
    """

    peak_bytes: int
    connections: int
    connection_bytes: int


def held(used: Contacts, target: Target, pools: Sequence[int]) -> HeldBytes:
    """Return the bytes and connections of the ranks that have most.

    used: of all passes, since connections stay. pools: of each rank, the bytes of its buffers.
    """
    made = []
    for rank in range(len(pools)):
        pairs, groups = connections(used.links, target, rank), sum(rank in ranks for ranks in used.groups)
        made.append((pairs * target.connection_bytes + groups * target.group_bytes, pairs + groups))
    peak = max(pool + nbytes for pool, (nbytes, _) in zip(pools, made, strict=True))
    nbytes, count = max(made)
    return HeldBytes(peak, count, nbytes)


def program_bytes(schedule: ScheduleData, workload: Workload, program: Program, one_sided: bool = False) -> int:
    """Return the bytes of one rank's buffer pool for a program; saved tensors and outputs are not counted."""
    sizes = slot_bytes(schedule, workload, program)
    slots = [slot for slot, spec in enumerate(program.slots) if spec.pooled]
    slots += landing_slots(program) if one_sided else []
    bundled = sum(aligned(each) for each in bundled_bytes(sizes, program).values())
    return sum(aligned(sizes[slot]) for slot in slots) + bundled + aligned(scratch_bytes(schedule, workload, program))


def staged_bytes(schedule: ScheduleData, workload: Workload, program: Program) -> int:
    """Return the bytes of device memory beside the pool into which the largest collective copies.

    These are copies of what a rank gives and takes. An all-gather takes the rank's own with the others', and gives what
    lies in the pool.
    """
    whole = [each for each in program.collectives if each.kind != BUNDLE]
    if not whole:
        return 0
    posts = {each.message: each for each in program.instructions if isinstance(each, Send | Recv)}
    sizes = message_bytes(slot_bytes(schedule, workload, program), program)
    most = 0
    for each in whole:
        given, taken = 0, 0
        for post in (posts[message] for message in each.messages):
            nbytes = sizes[post.message]
            given, taken = given + nbytes * isinstance(post, Send), taken + nbytes * isinstance(post, Recv)
        own = taken // (len(each.ranks) - 1)
        most = max(most, taken + (own if each.kind == ALL_GATHER else given))
    return most


def incoming(schedule: ScheduleData, workload: Workload, program: Program) -> dict[Link, list[int]]:
    """Return the bytes of each message that a rank receives, by link."""
    sizes = message_bytes(slot_bytes(schedule, workload, program), program)
    found: dict[Link, list[int]] = defaultdict(list)
    for each in program.instructions:
        if isinstance(each, Recv):
            found[each.src, program.rank, each.channel].append(sizes[each.message])
    return found


def kept_bytes(schedule: ScheduleData, workload: Workload, program: Program) -> int:
    """Return the bytes that forward keeps for backward beside the rank's own tensors."""
    sizes = slot_bytes(schedule, workload, program)
    return sum(size for size, slot in zip(sizes, program.slots, strict=True) if slot.kept)


def peak_bytes(
    schedule: ScheduleData, workload: Workload, direction: Pass, target: Target, supports: Supports
) -> int:
    """Return the bytes that the rank needs that needs most: its pool, and the transport's connections or boxes."""
    check_workload(schedule, workload, direction)
    pools = Pools(schedule, workload, target)
    for rank in range(schedule.world_size):
        pools.add(lower(schedule, rank, direction, workload, target, supports))
    return held(contacts(schedule, target, (direction,)), target, pools.nbytes()).peak_bytes


class Pools:
    """Bytes of each rank's buffers, with what its transport copies through and the boxes of all ranks' messages.

    Programs are given one after another, by rank: there is no need to have those of all ranks at once.
    """

    def __init__(self, schedule: ScheduleData, workload: Workload, target: Target) -> None:
        self._schedule, self._workload, self._target = schedule, workload, target
        self._own: list[int] = []
        self._messages: dict[Link, list[int]] = {}

    def add(self, program: Program, more: int = 0) -> None:
        """Add the program of the next rank; more: bytes that it holds beside its buffers."""
        given = self._schedule, self._workload, program
        self._own.append(program_bytes(*given, self._target.one_sided) + staged_bytes(*given) + more)
        if self._target.mailboxes:
            self._messages |= incoming(*given)

    def nbytes(self) -> list[int]:
        """Return the bytes of each rank."""
        boxes = lay(self._messages).nbytes
        return [own + boxes for own in self._own]


def flops(schedule: ScheduleData, workload: Workload, direction: Pass = "forward") -> dict[int, int]:
    """Return each rank's floating-point operations: those of its operator, for each visible pair of a query head."""
    check_workload(schedule, workload, direction)
    low, high = workload.q_head_range(0, schedule.head_groups)
    widths = workload.head_dim, workload.value_dim
    a_pair = flops_per_pair(direction, *widths, schedule.operator) * workload.batch * (high - low)
    total = dict.fromkeys(range(schedule.world_size), 0)
    for tile in schedule.tiles:
        for q in tile.q:
            for kv in tile.kv:
                region = schedule.mask.region(schedule.positions(q), schedule.positions(kv))
                total[tile.rank] += a_pair * sum(patch.pairs() for patch in region)
    return total
