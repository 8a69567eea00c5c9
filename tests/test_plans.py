"""DESIGN §7: plans beyond the named schedules are expressed in the IR, proved, exported, and run exactly."""

from __future__ import annotations

import pytest
from plans import (
    KEEP,
    mixed_stationary,
    on_the_wire,
    own_nic,
    reduced_in_node,
    sub_sharded,
    tiles,
    two_level_ring,
    ulysses,
    usp,
)

import tokenring as tr
from tokenring.layout import make_layout
from tokenring.schedule.build import Scheme, build
from tokenring.schedule.schemes import make_schedule, ring
from tokenring.workload import Workload

PLANS: dict[str, tuple[int, Scheme]] = {
    "kept Ulysses": (8, ulysses(8)),
    "Ulysses, gathered again": (8, ulysses(8, keep=frozenset())),
    "USP 2 × 4": (8, usp(2)),
    "USP 2 × 4, kept": (8, usp(2, KEEP)),
    "tiles 2 × 4": (8, tiles(4)),
    "6 heads on 8 ranks in 2 × 2 × 2 sub-sharded tiles": (8, sub_sharded(2, 2, 2)),
    "partials reduced inside the node before they cross": (8, reduced_in_node(4)),
    "KV crosses once by its own NIC": (8, own_nic(4)),
    "two-level ring": (8, two_level_ring(4)),
    "Q here, KV there": (8, mixed_stationary()),
    "payload codec": (8, on_the_wire(ring(), {"kv": "bf16"})),
}
MASKS = {"full": tr.Full(), "causal": tr.Causal(), "packed": tr.Causal() & tr.Documents([0, 100, 301, 500])}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("ranks", "scheme"), PLANS.values(), ids=PLANS)
def test_plan_is_expressed_proved_and_exported(ranks: int, scheme: Scheme, layout: str, mask: tr.Mask) -> None:
    """Build, verify both passes with all programs replayed, and read back from JSON as the same schedule."""
    whole = make_layout(layout, ranks, 512)
    schedule = build(scheme, whole, whole, mask).verify()
    assert tr.Schedule.from_json(schedule.to_json()) == schedule
    assert tr.Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("name", ["direct-q", "tokenring", "direct-kv", "ring", "bidirectional"])
def test_queries_over_a_cached_kv_of_another_length(name: str) -> None:
    """Partial prefill: 64 new tokens over 1,024 cached ones."""
    schedule = make_schedule(
        name, make_layout("contiguous", 8, 64), make_layout("striped", 8, 1024), tr.Full()
    ).verify()
    assert tr.Schedule.from_json(schedule.to_json()) == schedule


def test_moving_queries_over_a_cache_is_cheap() -> None:
    """8 q, out and lse rows a link against 128 k and v rows."""
    layouts = make_layout("contiguous", 8, 64), make_layout("contiguous", 8, 1024)
    row = 8 * 64 * 4
    loads = {
        name: max(make_schedule(name, *layouts, tr.Full()).link_bytes(Workload(1, 64, 1024, 8, 8, 64)).values())
        for name in ("direct-q", "direct-kv")
    }
    assert loads == {"direct-q": 8 * (2 * row + 8 * 4), "direct-kv": 128 * 2 * row}


def test_ulysses_moves_what_the_table_says() -> None:
    """(2X+Y)/P on each link forward; kept, backward moves dO and statistics out and dQ, dK, dV home."""
    ranks, length = 8, 512
    whole = make_layout("zigzag", ranks, length)
    schedule = build(ulysses(ranks), whole, whole, tr.Causal())
    workload = Workload(1, length, length, 8, 8, 64)
    tokens, row = length // ranks, 64 * 4
    forward = schedule.link_bytes(workload, "forward")
    assert set(forward.values()) == {tokens * (4 * row + 4)}  # q, k, v there; out and lse back: one head
    assert len(forward) == ranks * (ranks - 1)
    backward = schedule.link_bytes(workload, "backward")
    assert set(backward.values()) == {tokens * (row + 2 * 4 + 3 * row)}  # dout, lse, delta; dq, dk, dv


def test_ulysses_under_zigzag_is_one_causal_kernel_call() -> None:
    """fuse reassembles sequence order where a rank holds all of it."""
    from tokenring.schedule.lower import lower
    from tokenring.schedule.program import Attend

    whole = make_layout("zigzag", 8, 512)
    schedule = build(ulysses(8), whole, whole, tr.Causal())
    for rank in range(8):
        program = lower(schedule, rank, "forward", Workload(1, 512, 512, 8, 8, 64))
        calls = [each for each in program.instructions if isinstance(each, Attend)]
        assert len(calls) == 1
        assert calls[0].patch.is_causal
        assert calls[0].patch.rows == 512


def test_codec_halves_what_it_encodes() -> None:
    whole = make_layout("zigzag", 4, 256)
    workload = Workload(1, 256, 256, 4, 4, 64)
    plain, coded = (build(scheme, whole, whole, tr.Full()) for scheme in (ring(), on_the_wire(ring(), {"kv": "bf16"})))
    assert coded.link_bytes(workload)[0, 1] * 2 == plain.link_bytes(workload)[0, 1]


def test_partials_cross_once_between_nodes() -> None:
    """Reduced inside the node: one fp32 partial for each owner crosses, not four."""
    whole = make_layout("zigzag", 8, 256)
    schedule = build(reduced_in_node(4), whole, whole, tr.Full())
    crossing = [move for move in schedule.moves if move.src // 4 != move.dst // 4 and move.block.kind == "q_partial"]
    assert len(crossing) == 8 * 2  # owners × chunks
    assert all(schedule.in_full_precision(move) for move in crossing)
    flat = build(Scheme("flat", lambda pair: pair.kv_owner, reduced_in_node(4).gather_q), whole, whole, tr.Full())
    assert sum(m.src // 4 != m.dst // 4 and m.block.kind == "q_partial" for m in flat.moves) == 8 * 2 * 4
