"""Every family, wherever it fits, is proved in both passes; so is what is made of it: other ranks, finer pieces."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations, product

import pytest
from bases import CHUNKS_A_RANK, mask_of
from families import HEADS, OPTIONS, Point, length_of, make, members, points, sample
from mutants import KINDS
from sampling import FULL_GRID
from test_verify import check_refused, spread

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import PARTIALS
from tokenring.schedule.families import FAMILIES, arranged, in_pieces, mirrored, parse, variants
from tokenring.schedule.families.cycles import hamiltonian
from tokenring.schedule.scheme import build
from tokenring.sequence.layout import make_layout
from tokenring.sequence.workload import Workload

LAYOUTS = ("contiguous", "zigzag", "striped")
MASKS = ("full", "causal", "window", "window both ways", "documents", "all three")
PIECES = (None, 2)
FACTORS = {"layout": LAYOUTS, "mask": MASKS, "pieces": PIECES}
MANY_TILES = ("sub-sharded", "mesh-q", "mesh-kv")
Row = tuple[Point, str, str, int | None]


def each_once(found: list[Point]) -> list[Row]:
    """Each member once, with a layout, mask and number of pieces that met least often: each other, and its family."""
    rows, met = list[Row](), Counter[tuple[object, ...]]()
    for point in {point.name: point for point in found}.values():
        # In pieces those have most tiles that have many anyway: minutes.
        whole = parse(point.name).family.least_pieces >= 4 or point.family in MANY_TILES
        every = list(product(LAYOUTS, MASKS, (None,) if whole else PIECES))
        pairs = [list(combinations((point.family, *row), 2)) for row in every]
        at = min(range(len(every)), key=lambda at: sum(met[pair] for pair in pairs[at]))
        met.update(pairs[at])
        rows.append((point, *every[at]))
    return rows


SOME = (2, 4, 5, 6, 8, 9)


def members_at(ranks: int) -> list[str]:
    """The members for so many ranks; each where there are fewest, or with TOKENRING_FULL_GRID=1 wherever it fits."""
    before = {name for fewer in SOME if fewer < ranks and not FULL_GRID for name in members_at(fewer)}
    names = dict.fromkeys(name for heads in HEADS for name in members(ranks, heads))
    return [name for name in names if name not in before]


GRID = sample(points(range(2, 10)), FACTORS)
LARGE = sample(points([16], ("",)), FACTORS) if FULL_GRID else each_once(points([16], ("",)))  # options: in the grid
NEW = ("usp/2", "ulysses/2", "tiles/2x2", "sub-sharded/1x2x2", "case-iii/2", "relay/2", "reduced/2", "double-ring/2")


def ids(row: tuple[object, ...]) -> str:
    point = row[0]
    assert isinstance(point, Point)
    return f"{point.ranks} ranks, {point.name}, {', '.join(map(str, row[1:]))}"


def check_verified(point: Point, layout: str, mask: str, pieces: int | None) -> None:
    pieces = None if pieces is None else pieces * parse(point.name).family.least_pieces
    length = length_of(point, CHUNKS_A_RANK[layout], pieces, least=8)
    made = make(point.name, point.ranks, layout, mask_of(mask, length), length, pieces)
    assert made.verify() is made
    assert made.name == point.name


class TestProof:
    @pytest.mark.sampled(48)
    @pytest.mark.parametrize("row", GRID, ids=ids)
    def test_any_two_circumstances(self, row: Row) -> None:
        check_verified(*row)

    @pytest.mark.sampled(16)
    @pytest.mark.slow
    @pytest.mark.parametrize("row", LARGE, ids=ids)
    def test_sixteen_ranks(self, row: Row) -> None:
        """Every member."""
        check_verified(*row)

    @pytest.mark.parametrize("ranks", SOME)
    def test_every_member_under_a_causal_mask(self, ranks: int) -> None:
        for name in members_at(ranks):
            point = Point(ranks, HEADS[0], "", "", name)
            check_verified(point, "zigzag", "causal", None)

    def test_the_grid_has_every_family_option_and_head_count(self) -> None:
        met = [row[0] for row in GRID]
        assert {point.family for point in met} == set(FAMILIES)
        assert {(point.family, point.ranks) for point in met} == {(p.family, p.ranks) for p in points(range(2, 10))}
        assert {(point.heads, point.option) for point in met} == set(product(HEADS, OPTIONS))

    @pytest.mark.parametrize(
        "name",
        ["usp/1", "usp/8", "double-ring/1", "double-ring/8", "relay/1", "relay/8", "relay-q/8", "case-iii/1",
         "case-iii/8", "reduced/1", "reduced/8", "mesh-kv/2x1x4", "mesh-q/8x1", "sub-sharded/8x1x1", "tiles/1x8",
         "tiles/8x1", "mixed/3x4", "ulysses/3", "uneven/3", "uneven/17"],
    )  # fmt: skip
    def test_parameters_that_are_never_offered(self, name: str) -> None:
        check_verified(Point(8, HEADS[0], "", "", name), "zigzag", "causal", None)

    @pytest.mark.parametrize("name", NEW)
    def test_mutants_are_refused(self, name: str) -> None:
        """A sample of all kinds of mutants that there are."""
        schedule = make(name, 4, "zigzag", tr.Causal(), 64).verify()
        kinds = 0
        for kind in KINDS.values():
            found = spread(kind(schedule), 2)
            kinds += bool(found)
            for mutant in found:
                check_refused(mutant)
        assert kinds >= 10


# ---------- changes


class TestArranged:
    ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

    @pytest.mark.parametrize("name", ["ring", "usp/2", "double-ring/4", "relay/4", "case-iii/4", "mixed", "ulysses"])
    def test_ranks_play_other_ranks(self, name: str) -> None:
        """The same moves between other ranks; what crosses between even and odd ranks is what crossed between nodes."""
        whole, size = make_layout("contiguous", 8, 128), Workload(1, 128, 128, 8, 8, 8)
        scheme = parse(name).make(8)
        plain = build(scheme, whole, whole, tr.Full())
        other = build(arranged(scheme, self.ORDER), whole, whole, tr.Full()).verify()
        moved = {(self.ORDER[src], self.ORDER[dst]): nbytes for (src, dst), nbytes in plain.link_bytes(size).items()}
        assert moved == other.link_bytes(size)

    @pytest.mark.sampled(12)
    @pytest.mark.parametrize("name", [name for name in members(8, (8, 8)) if not name.startswith("sub")])
    def test_under_a_causal_mask(self, name: str) -> None:
        scheme, whole = parse(name).make(8), make_layout("zigzag", 8, 16 * 28)
        build(arranged(scheme, self.ORDER), whole, whole, tr.Causal()).verify()

    def test_back_again(self) -> None:
        whole = make_layout("zigzag", 8, 128)
        scheme = parse("double-ring/4").make(8)
        back = [self.ORDER.index(rank) for rank in range(8)]
        assert build(arranged(arranged(scheme, self.ORDER), back), whole, whole, tr.Causal()) == build(
            scheme, whole, whole, tr.Causal()
        )
        assert arranged(scheme, range(8)) is scheme
        assert build(mirrored(mirrored(scheme, 8), 8), whole, whole, tr.Causal()) == build(
            scheme, whole, whole, tr.Causal()
        )

    @pytest.mark.parametrize("order", [(0, 1, 1), (1, 2, 3), (0, 2)])
    def test_refuses_what_is_no_order(self, order: tuple[int, ...]) -> None:
        with pytest.raises(ConfigurationError, match=f"does not name each of {len(order)} ranks once"):
            arranged(parse("ring").make(3), order)

    def test_refuses_another_world_size(self) -> None:
        with pytest.raises(ConfigurationError, match="was arranged for 3 ranks, not 4"):
            whole = make_layout("contiguous", 4, 16)
            build(arranged(parse("ring").make(3), (2, 0, 1)), whole, whole, tr.Full())


class TestPieces:
    @pytest.mark.parametrize(
        "name", ["ulysses", "usp/2", "tiles/2x2", "relay/2", "double-ring/2", "relay-q/2", "mixed"]
    )
    def test_pieces_move_one_after_another(self, name: str) -> None:
        """As many bytes; each message of a piece; and nothing of the last piece before the first of it."""
        whole, size = make_layout("zigzag", 4, 128), Workload(1, 128, 128, 4, 4, 8)
        scheme = parse(name).make(4)
        one, three = (build(each, whole, whole, tr.Full()).verify() for each in (scheme, in_pieces(scheme, 4)))
        assert one.link_bytes(size) == three.link_bytes(size)
        cut = "q" if three.q_pieces > one.q_pieces else "kv"
        assert (three.q_pieces if cut == "q" else three.kv_pieces) == 4
        for move in three.moves:
            if move.block.kind == cut:
                assert move.step % 4 == move.block.piece

    def test_partials_of_one_piece_leave_before_the_next_is_computed(self) -> None:
        made = make("ulysses", 4, "zigzag", tr.Causal(), 128, pieces=4)
        home = {
            move.block.piece: move.step for move in made.moves if move.channel == PARTIALS and move.block.kind[0] == "q"
        }
        assert home == {0: 4, 1: 5, 2: 6, 3: 7}


class TestLate:
    @pytest.mark.parametrize("name", ["tokenring", "direct-q", "tiles/2x2", "case-iii/2", "relay-q/2"])
    def test_half_of_the_local_tile_comes_last(self, name: str) -> None:
        """After the last partial that a rank sends or gets; the rest stays as it is."""
        plain, late = (make(each, 4, "zigzag", tr.Causal(), 64).verify() for each in (name, f"{name}/late"))
        assert plain.moves == late.moves
        ends = [max(move.step for move in late.moves if rank in (move.src, move.dst)) for rank in range(4)]
        for rank in range(4):
            before, after = ([tile for tile in made.tiles if tile.rank == rank] for made in (plain, late))
            early, last = ([tile for tile in after if (tile.step > ends[rank]) == end] for end in (False, True))
            assert before[1:] == early[2:]
            assert {tile.step for tile in early[:2]} == {before[0].step}
            pairs = [sum(map(len, (tile.q, tile.kv))) for tile in (*early[:2], *last)]
            assert pairs == [2, 2, 2]  # two chunks with themselves, and one with the other

    @pytest.mark.parametrize("mask", [tr.Full(), tr.Causal()])
    def test_halves_are_equal(self, mask: tr.Mask) -> None:
        """As much work before the last partial as after it."""
        plain, late = (make(name, 4, "zigzag", mask, 512) for name in ("tokenring", "tokenring/late"))
        size = Workload(1, 512, 512, 1, 1, 8)
        end = max(move.step for move in late.moves)
        early = late.replace(tiles=tuple(tile for tile in late.tiles if tile.step <= end)).flops(size)
        local = plain.replace(tiles=tuple(tile for tile in plain.tiles if tile.step == 0)).flops(size)
        for rank, flops in plain.flops(size).items():
            assert flops == late.flops(size)[rank]
            assert (flops - early[rank]) / local[rank] == pytest.approx(0.5, abs=0.01)

    def test_nothing_to_cut(self) -> None:
        """One chunk a rank: the local tile is one unit of q and of kv. In two pieces it can be cut."""
        assert (
            make("tokenring/late", 4, "contiguous", tr.Full(), 64).tiles
            == make("tokenring", 4, "contiguous", tr.Full(), 64).tiles
        )
        assert len(make("tokenring/late", 4, "contiguous", tr.Full(), 64, 2).verify().tiles) == 20

    def test_no_partials_no_change(self) -> None:
        """Where nothing comes home in either pass; a fused tile is not local."""
        plain, late = (make(name, 4, "zigzag", tr.Full(), 64) for name in ("ulysses", "ulysses/late"))
        assert plain.tiles == late.tiles
        assert (
            make("tokenring/late", 1, "zigzag", tr.Full(), 64).tiles
            == make("tokenring", 1, "zigzag", tr.Full(), 64).tiles
        )


# ---------- cycles


class TestCycles:
    @pytest.mark.parametrize("ranks", [*range(2, 4), 5, *range(7, 22), 24, 27, 32, 33])
    def test_every_link_once(self, ranks: int) -> None:
        cycles = hamiltonian(ranks)
        assert cycles is not None
        assert len(cycles) == ranks - 1
        assert len({(rank, after) for cycle in cycles for rank, after in enumerate(cycle)}) == ranks * (ranks - 1)
        for cycle in cycles:
            path = [0]
            while (rank := cycle[path[-1]]) != 0:
                path.append(rank)
            assert sorted(path) == list(range(ranks))

    @pytest.mark.parametrize("ranks", [4, 6])
    @pytest.mark.parametrize(("name", "instead"), [("multi-ring", "direct-kv"), ("multi-ring-q", "direct-q")])
    def test_none_of_four_and_six(self, ranks: int, name: str, instead: str) -> None:
        assert hamiltonian(ranks) is None
        says = f"schedule '{name}' on {ranks} ranks: no {ranks - 1} Hamiltonian cycles without a common link exist; "
        with pytest.raises(ConfigurationError, match=f"^{re.escape(says)}take {instead}$"):
            parse(name).make(ranks)
        assert name not in variants(ranks)
