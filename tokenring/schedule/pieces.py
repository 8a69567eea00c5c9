"""A schedule by name for a workload, in the pieces that pay."""

from __future__ import annotations

from collections.abc import Sequence

from tokenring.schedule.families.registry import check_heads
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Workload

PIECES_THAT_PAY = (2,)  # measured: more cost more messages than they hide
LEAST_PIECE_BYTES = 1 << 16  # below, a message costs more than its bytes
CUT_BY_DEFAULT = frozenset({"direct-kv", "direct-q"})


def default_pieces(name: str, workload: Workload, q_layout: Layout, kv_layout: Layout) -> int | None:
    """Return in how many pieces a named schedule moves its chunks by default: direct ones, where it pays."""
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
    name: str, workload: Workload, q_layout: Layout, kv_layout: Layout, mask: Mask, pieces: int | None = None,
    order: Sequence[int] | None = None,
) -> Schedule:  # fmt: skip
    """Make a named schedule for a workload, in its default pieces unless `pieces` says how many.

    order: as of `make_schedule`.
    """
    if pieces is None:
        pieces = default_pieces(name, workload, q_layout, kv_layout)
    made = make_schedule(name, q_layout, kv_layout, mask, pieces=pieces, order=order)
    check_heads(name, made.head_groups, workload)
    return made
