"""DESIGN §7: plans beyond rings are expressed in the IR, proved and exported; they are members of families."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tokenring as tr
from tokenring.schedule.families import at_key, parse
from tokenring.schedule.names import make_schedule, ring
from tokenring.schedule.routes import mesh
from tokenring.schedule.scheme import Scheme, build
from tokenring.sequence.layout import make_layout
from tokenring.sequence.workload import Workload

PLANS: dict[str, str] = {
    "kept Ulysses": "ulysses",
    "Ulysses, gathered again": "ulysses/regather",
    "USP 2 × 4": "usp/2",
    "USP 2 × 4, kept": "usp/2/keep",
    "tiles 2 × 4": "tiles/2x4",
    "6 heads on 8 ranks in 2 × 2 × 2 sub-sharded tiles": "sub-sharded/2x2x2",
    "partials reduced inside the node before they cross": "reduced/4",
    "KV crosses once by its own NIC": "relay/4",
    "two-level ring": "double-ring/4",
    "Q here, KV there": "mixed",
    "payload codec": "ring coded",
}


def scheme_of(name: str) -> Scheme:
    """On eight ranks."""
    return on_the_wire(ring()) if name == "ring coded" else parse(name).make(8)


def on_the_wire(scheme: Scheme) -> Scheme:
    """The same scheme with its kv in bf16 on the wire."""
    return replace(scheme, name=f"{scheme.name}-coded", codecs=(("kv", "bf16"),))


MASKS = {"full": tr.Full(), "causal": tr.Causal(), "packed": tr.Causal() & tr.Documents([0, 100, 301, 500])}


@pytest.mark.sampled(28)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("name", PLANS.values(), ids=PLANS)
def test_plan_is_expressed_proved_and_exported(name: str, layout: str, mask: tr.Mask) -> None:
    """Build, verify both passes with all programs replayed, and read back from JSON as the same schedule."""
    whole = make_layout(layout, 8, 512)
    schedule = build(scheme_of(name), whole, whole, mask).verify()
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
    schedule = build(scheme_of("ulysses"), whole, whole, tr.Causal())
    workload = Workload(1, length, length, 8, 8, 64)
    tokens, row = length // ranks, 64 * 4
    forward = schedule.link_bytes(workload, "forward")
    assert set(forward.values()) == {tokens * (4 * row + 4)}  # q, k, v there; out and lse back: one head
    assert len(forward) == ranks * (ranks - 1)
    backward = schedule.link_bytes(workload, "backward")
    assert set(backward.values()) == {tokens * (row + 2 * 4 + 3 * row)}  # dout, lse, delta; dq, dk, dv


def test_ulysses_under_zigzag_is_one_causal_kernel_call() -> None:
    """fuse reassembles sequence order where a rank holds all of it."""
    from tokenring.lowering.lower import lower
    from tokenring.lowering.program import Attend

    whole = make_layout("zigzag", 8, 512)
    schedule = build(scheme_of("ulysses"), whole, whole, tr.Causal())
    for rank in range(8):
        program = lower(schedule, rank, "forward", Workload(1, 512, 512, 8, 8, 64))
        calls = [each for each in program.instructions if isinstance(each, Attend)]
        assert len(calls) == 1
        assert calls[0].patch.is_causal
        assert calls[0].patch.rows == 512


def test_codec_halves_what_it_encodes() -> None:
    whole = make_layout("zigzag", 4, 256)
    workload = Workload(1, 256, 256, 4, 4, 64)
    plain, coded = (build(scheme, whole, whole, tr.Full()) for scheme in (ring(), on_the_wire(ring())))
    assert coded.link_bytes(workload)[0, 1] * 2 == plain.link_bytes(workload)[0, 1]


def test_partials_cross_once_between_nodes() -> None:
    """Reduced inside the node: one fp32 partial for each owner crosses, not four."""
    whole = make_layout("zigzag", 8, 256)
    schedule = build(scheme_of("reduced/4"), whole, whole, tr.Full())
    crossing = [move for move in schedule.moves if move.src // 4 != move.dst // 4 and move.block.kind == "q_partial"]
    assert len(crossing) == 8 * 2  # owners × chunks
    assert all(schedule.in_full_precision(move) for move in crossing)
    flat = build(Scheme("flat", at_key, mesh([8])), whole, whole, tr.Full())
    assert sum(m.src // 4 != m.dst // 4 and m.block.kind == "q_partial" for m in flat.moves) == 8 * 2 * 4
