"""What pruning saves and what links carry: closed formulas, derived here, against the schedules.

Causal, a rank's shard in equal chunks, P ranks. kv chunk j is needed at rank s when some q chunk of s
is not before j; q chunk i when some kv chunk of s is not after i. A ring takes a block as far as the
last rank on its way that needs it; direct routes take it to each rank that needs it and no other.
Dense, each chunk makes P-1 hops either way.

*contiguous*: kv chunk j is needed at s >= j. Towards rank+1 that is P-1-j hops, P(P-1)/2 in all: 1/2 of
the dense P(P-1). Towards rank-1 the last of them, j+1, is a whole round away: P-1 hops, but none for
j = P-1: (P-1)^2 in all, (P-1)/P of dense. q chunks are needed at s <= i, so the directions change
places. Direct: P-1-j ranks need kv chunk j: 1/2.

*zigzag*: rank s holds chunks s and 2P-1-s, so kv chunk j is needed at s <= 2P-1-j. The first P chunks are
needed everywhere: P(P-1) hops. Chunk 2P-1-r, of rank r, is needed at ranks 0..r: towards rank-1 these
are its next r, P(P-1)/2 hops in all, together 3/4 of the dense 2P(P-1); towards rank+1 the last of them,
r-1, is a whole round away, except for r = 0, which no other rank needs: (P-1)^2 hops, together
(2P-1)/2P. q chunk i is needed at s <= i: the same numbers, as i and 2P-1-j run over the same ranks.
Direct: chunk 2P-1-r goes to r ranks: 3/4.

*striped*: every chunk reaches from the beginning to the end (two tokens or more): nothing is saved.

Gradients of kv that follow their ring are the dual: they travel from the first rank on their way that
adds something to the end, so what one direction saves going out, the other saves coming home.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tokenring.ir.schedule_data import Kind, Pass
from tokenring.schedule import routes
from tokenring.schedule.by_name import schedule
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import Pair, Scheme, build
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Causal, Full
from tokenring.sequence.workload import Workload

WORLDS = range(2, 9)
HALF, ALL = Fraction(1, 2), Fraction(1)


def near(layout: str) -> Fraction:
    """A ring in the direction in which blocks meet first the ranks that need them; direct routes too."""
    return {"contiguous": HALF, "zigzag": Fraction(3, 4), "striped": ALL}[layout]


def far(layout: str, ranks: int) -> Fraction:
    """A ring in the other direction."""
    return {
        "contiguous": Fraction(ranks - 1, ranks),
        "zigzag": Fraction(2 * ranks - 1, 2 * ranks),
        "striped": ALL,
    }[layout]


def hops(made: Schedule, kind: Kind) -> int:
    """Tokens times hops."""
    return sum(made.unit_length(kind) for move in made.moves if move.block.kind == kind)


def share(name: str, ranks: int, layout: str, direction: int | None, kind: Kind, pieces: int | None = None) -> Fraction:
    """What causal moves of a kind, as part of what the full mask moves."""
    pruned, dense = (schedule(name, ranks, layout, mask, direction, pieces) for mask in (Causal(), Full()))
    return Fraction(hops(pruned, kind), hops(dense, kind))


def towards_need(layout: str, kind: Kind) -> int:
    """The direction in which a block soon meets those that need it."""
    return 1 if (layout, kind) == ("contiguous", "kv") else -1


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", WORLDS)
class TestCausalShare:
    @pytest.mark.parametrize(("name", "kind"), [("ring", "kv"), ("tokenring", "q")])
    def test_requests_of_rings(self, name: str, kind: Kind, ranks: int, layout: str) -> None:
        best = towards_need(layout, kind)
        assert share(name, ranks, layout, best, kind) == near(layout)
        assert share(name, ranks, layout, -best, kind) == far(layout, ranks)
        assert share(name, ranks, layout, None, kind) == near(layout)  # the better direction is found

    @pytest.mark.parametrize(("name", "kind"), [("direct-kv", "kv"), ("direct-q", "q")])
    def test_requests_of_direct_routes(self, name: str, kind: Kind, ranks: int, layout: str) -> None:
        assert share(name, ranks, layout, None, kind) == near(layout)

    def test_bidirectional_is_half_of_each(self, ranks: int, layout: str) -> None:
        assert share("bidirectional", ranks, layout, None, "kv") == (near(layout) + far(layout, ranks)) / 2

    @pytest.mark.parametrize("name", ["tokenring", "direct-q"])
    def test_partials_come_from_who_made_them_and_no_other(self, name: str, ranks: int, layout: str) -> None:
        assert share(name, ranks, layout, None, "q_partial") == near(layout)

    def test_gradients_of_kv_following_a_ring(self, ranks: int, layout: str) -> None:
        best = towards_need(layout, "kv")
        assert share("ring", ranks, layout, best, "kv_partial") == far(layout, ranks)
        assert share("ring", ranks, layout, -best, "kv_partial") == near(layout)

    @pytest.mark.parametrize(("name", "kind"), [("ring", "kv"), ("direct-q", "q")])
    def test_pieces_of_a_chunk_are_needed_at_the_same_ranks(
        self, name: str, kind: Kind, ranks: int, layout: str
    ) -> None:
        assert share(name, ranks, layout, None, kind, pieces=4) == near(layout)


def test_eight_ranks_zigzag() -> None:
    """The numbers of the paper's claim and of PRIOR_ART §2, by name."""
    rings: tuple[tuple[str, Kind], ...] = (("ring", "kv"), ("tokenring", "q"))
    for name, kind in rings:
        assert share(name, 8, "zigzag", -1, kind) == Fraction(525, 700)
        assert share(name, 8, "zigzag", 1, kind) == Fraction(65625, 70000)
    assert share("direct-kv", 8, "zigzag", None, "kv") == share("direct-q", 8, "zigzag", None, "q") == Fraction(3, 4)


@pytest.mark.parametrize("name", ["ring", "tokenring"])
def test_busiest_rank_of_a_causal_ring_sends_as_much_as_ever(name: str) -> None:
    """DESIGN §2: pruning takes bytes off a ring, but not off its worst link."""
    size = Workload(1, 1024, 1024, 4, 4, 16)
    dense, pruned = (schedule(name, 8, "zigzag", mask, -1) for mask in (Full(), Causal()))
    requests = {
        made: max(
            sum(made.unit_length(m.block.kind) for m in made.moves if m.channel == "requests" and m.src == rank)
            for rank in range(8)
        )
        for made in (dense, pruned)
    }
    assert requests[dense] == requests[pruned]
    assert sum(pruned.link_bytes(size).values()) < sum(dense.link_bytes(size).values())


# ---------- bytes on each link, full mask

LOCAL = 8


class Sizes:
    """X, Y and L (here `lse`) of DESIGN §2, and Y in fp32."""

    def __init__(self, ranks: int, dtype: torch.dtype) -> None:
        batch, q_heads, kv_heads, head_dim = 2, 6, 3, 10
        length = ranks * LOCAL
        self.workload = Workload(batch, length, length, q_heads, kv_heads, head_dim, dtype)
        self.x = batch * LOCAL * q_heads * head_dim * dtype.itemsize
        self.y = 2 * batch * LOCAL * kv_heads * head_dim * dtype.itemsize
        self.y_fp32 = 2 * batch * LOCAL * kv_heads * head_dim * 4
        self.lse = batch * LOCAL * q_heads * 4


def every_link(ranks: int, nbytes: int) -> dict[tuple[int, int], int]:
    return {(src, dst): nbytes for src in range(ranks) for dst in range(ranks) if src != dst}


def next_link(ranks: int, direction: int, nbytes: int) -> dict[tuple[int, int], int]:
    return {(rank, (rank + direction) % ranks): nbytes for rank in range(ranks)}


def total(*parts: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    return {link: sum(part.get(link, 0) for part in parts) for link in sorted(set().union(*parts))}


def expected(name: str, ranks: int, direction: int, size: Sizes, of: Pass) -> dict[tuple[int, int], int]:
    """By hand. Forward: as DESIGN §2. Backward: a q block is Q, dO, lse and delta, its partial dQ, a kv partial
    dK and dV. On a ring each kv partial makes P-1 hops in fp32, as every rank adds its own to it; from the
    only other rank of two it goes straight home, in the input dtype."""
    x, y, lse, others = size.x, size.y, size.lse, ranks - 1
    forward = of == "forward"
    summed = size.y_fp32 if ranks > 2 else y
    around = others * y if forward else others * (y + summed)
    match name:
        case "ring":
            return next_link(ranks, direction, around)
        case "bidirectional":
            return total(next_link(ranks, 1, around // 2), next_link(ranks, -1, around // 2))
        case "tokenring":
            # The hottest link is the one to the next neighbour on the ring: the last partial goes over it too,
            # for that neighbour, whose q comes last to where it is sent from.
            block = x if forward else 2 * x + 2 * lse
            return total(next_link(ranks, direction, others * block), every_link(ranks, x + lse if forward else x))
        case "direct-q":
            return every_link(ranks, 2 * x + lse if forward else 3 * x + 2 * lse)
        case "direct-kv":
            return every_link(ranks, y if forward else 2 * y)
    raise AssertionError(name)


@pytest.mark.parametrize("of", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(
    ("name", "direction"),
    [("ring", 1), ("ring", -1), ("tokenring", 1), ("tokenring", -1), ("bidirectional", None),
     ("direct-q", None), ("direct-kv", None)],
)  # fmt: skip
def test_dense_bytes_of_each_link(name: str, direction: int | None, ranks: int, dtype: torch.dtype, of: Pass) -> None:
    size = Sizes(ranks, dtype)
    for layout in ("zigzag", "striped"):
        made = schedule(name, ranks, layout, Full(), direction, length=ranks * LOCAL)
        assert made.link_bytes(size.workload, of) == expected(name, ranks, direction or 1, size, of)


@pytest.mark.parametrize("ranks", [2, 5])
def test_what_is_kept_does_not_move_again(ranks: int) -> None:
    """Kept kv stay where forward gathered them; kept q leave dO and the statistics to be moved."""
    size = Sizes(ranks, torch.bfloat16)
    for keep, name, block in (("kv", "direct-kv", size.y), ("q", "direct-q", size.x)):
        made = schedule(name, ranks, "zigzag", length=ranks * LOCAL)
        kept = made.replace(keep=frozenset({keep}))
        assert kept.link_bytes(size.workload) == made.link_bytes(size.workload)
        again = made.link_bytes(size.workload, "backward")
        assert kept.link_bytes(size.workload, "backward") == {link: n - block for link, n in again.items()}


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (4, 2), (1, 4), (5, 1)])
def test_dense_bytes_of_tiles(rows: int, columns: int) -> None:
    """a × b tiles send (a-1)(2X+L) + (b-1)Y from each rank; backward (a-1)(3X+2L) + 2(b-1)Y."""
    ranks = rows * columns

    def place(pair: Pair) -> int:
        return pair.kv_owner // columns * columns + pair.q_owner % columns

    size = Sizes(ranks, torch.bfloat16)
    whole = make_layout("contiguous", ranks, ranks * LOCAL)
    made = build(Scheme("tiles", place, routes.direct, routes.direct), whole, whole, Full())
    a, b = rows - 1, columns - 1
    sent: dict[Pass, int] = {
        "forward": a * (2 * size.x + size.lse) + b * size.y,
        "backward": a * (3 * size.x + 2 * size.lse) + 2 * b * size.y,
    }
    for of, wanted in sent.items():
        links = made.link_bytes(size.workload, of)
        assert {sum(n for (src, _), n in links.items() if src == rank) for rank in range(ranks)} == {wanted}


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_dense_bytes_of_ulysses(ranks: int) -> None:
    """(2X+Y+L)/P on each link: the L, which DESIGN §2 leaves out, is the lse, needed at home by backward."""
    length = ranks * LOCAL
    size = Workload(1, length, length, 6, 6, 10, torch.bfloat16)
    x, lse = LOCAL * 6 * 10 * 2, LOCAL * 6 * 4
    whole = make_layout("zigzag", ranks, length)
    scheme = Scheme("ulysses", lambda pair: pair.heads, routes.all_to_all, routes.all_to_all, head_groups=ranks)
    made = build(scheme, whole, whole, Full())
    assert made.link_bytes(size) == every_link(ranks, (4 * x + lse) // ranks)
