"""Every family, wherever it fits: proved in both passes; its bytes are those of the formulas; what names say.

X: bytes of a rank's Q or O; Y: of its KV; L: of its lse. P ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
from bases import CHUNKS_A_RANK, mask_of
from families import HEADS, OPTIONS, Point, length_of, make, members, points, sample
from mutants import KINDS
from test_verify import check_refused, spread

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.layout import make_layout
from tokenring.schedule.build import build
from tokenring.schedule.families import FAMILIES, arranged, in_pieces, mirrored, misfit, parse, variants
from tokenring.schedule.families.cycles import hamiltonian
from tokenring.schedule.ir import PARTIALS, Schedule
from tokenring.schedule.schemes import make_schedule
from tokenring.workload import Workload

FACTORS = {
    "layout": ("contiguous", "zigzag", "striped"),
    "mask": ("full", "causal", "window", "window both ways", "documents", "all three"),
    "pieces": (None, 2),
}
GRID = sample(points(range(2, 10)), FACTORS)
LARGE = sample(points([16], ("", "/late")), FACTORS)
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
    @pytest.mark.parametrize("row", GRID, ids=ids)
    def test_any_two_circumstances(self, row: tuple[Point, str, str, int | None]) -> None:
        check_verified(*row)

    @pytest.mark.slow
    @pytest.mark.parametrize("row", LARGE, ids=ids)
    def test_sixteen_ranks(self, row: tuple[Point, str, str, int | None]) -> None:
        check_verified(*row)

    @pytest.mark.parametrize("ranks", [2, 4, 5, 6, 8, 9])
    def test_every_member_under_a_causal_mask(self, ranks: int) -> None:
        for name in dict.fromkeys(name for heads in HEADS for name in members(ranks, heads)):
            point = Point(ranks, HEADS[0], "", "", name)
            check_verified(point, "zigzag", "causal", None)

    def test_the_grid_has_every_family_option_and_head_count(self) -> None:
        met = [row[0] for row in GRID]
        assert {point.family for point in met} == set(FAMILIES)
        assert {(point.family, point.ranks) for point in met} == {(p.family, p.ranks) for p in points(range(2, 10))}
        assert {(point.heads, point.option) for point in met} == set(product(HEADS, OPTIONS))

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


# ---------- bytes


def schedule_of(name: str, ranks: int, mask: tr.Mask | None = None) -> Schedule:
    return make(name, ranks, "zigzag", mask or tr.Full(), 2 * ranks * 840)


def size_of(schedule: Schedule, q_heads: int = 8, kv_heads: int = 8) -> Workload:
    length = schedule.q_layout.length
    return Workload(1, length, length, q_heads, kv_heads, 32)


def units(ranks: int, q_heads: int = 8, kv_heads: int = 8) -> tuple[float, float, float]:
    """X, Y, L."""
    tokens = 2 * 840
    return tokens * q_heads * 32 * 4, 2 * tokens * kv_heads * 32 * 4, tokens * q_heads * 4


def sent(schedule: Schedule, size: Workload, direction: str = "forward", crossing: int = 0) -> set[int]:
    """The bytes that ranks send; from node to node alone, of so many ranks each."""
    out = dict.fromkeys(range(schedule.world_size), 0)
    for (src, dst), nbytes in schedule.link_bytes(size, direction).items():  # type: ignore[arg-type]
        if not crossing or src // crossing != dst // crossing:
            out[src] += nbytes
    return set(out.values())


FORWARD: dict[str, tuple[int, Callable[[float, float, float], float]]] = {
    "ring": (8, lambda x, y, s: 7 * y),
    "tokenring": (8, lambda x, y, s: 7 * (2 * x + s)),
    "direct-kv": (8, lambda x, y, s: 7 * y),
    "direct-q": (8, lambda x, y, s: 7 * (2 * x + s)),
    "all-gather-kv": (8, lambda x, y, s: 7 * y),
    "ulysses": (8, lambda x, y, s: 7 / 8 * (2 * x + y + s)),
    "ulysses/2": (4, lambda x, y, s: 3 / 4 * (2 * x + y + s)),
    "usp/2": (8, lambda x, y, s: 1 / 2 * (2 * x + y + s) + 3 * y),
    "usp/4": (8, lambda x, y, s: 3 / 4 * (2 * x + y + s) + y),
    "tiles/2x4": (8, lambda x, y, s: 2 * x + s + 3 * y),
    "tiles/4x2": (8, lambda x, y, s: 3 * (2 * x + s) + y),
    "sub-sharded/2x2x2": (8, lambda x, y, s: 7 * ((2 * x + s) / 4 + y / 4)),
    "sub-sharded/1x4x2": (8, lambda x, y, s: 7 * ((2 * x + s) / 4 + y / 2)),
    "double-ring/4": (8, lambda x, y, s: 7 * y),
    "case-iii/4": (8, lambda x, y, s: 3 * (2 * x + s) + y),
    "case-iii-direct/4": (8, lambda x, y, s: 3 * (2 * x + s) + y),
    "relay/4": (8, lambda x, y, s: 7 * y),
    "relay-q/4": (8, lambda x, y, s: 7 * (2 * x + s)),
    "reduced/4": (8, lambda x, y, s: 7 * (2 * x + s)),
    "mesh-kv/2x2x2": (8, lambda x, y, s: 7 * y),
    "multi-ring": (8, lambda x, y, s: 7 * y),
    "multi-ring-q": (8, lambda x, y, s: 7 * (2 * x + s)),
}
BACKWARD: dict[str, tuple[int, Callable[[float, float, float], float]]] = {
    "tokenring": (8, lambda x, y, s: 7 * (3 * x + 2 * s)),
    "direct-q": (8, lambda x, y, s: 7 * (3 * x + 2 * s)),
    "direct-kv": (8, lambda x, y, s: 14 * y),
    "tiles/2x4": (8, lambda x, y, s: 3 * x + 2 * s + 6 * y),
    "ulysses/regather": (8, lambda x, y, s: 7 / 8 * (3 * x + 2 * s + 2 * y)),
    "ulysses": (8, lambda x, y, s: 7 / 8 * (2 * x + 2 * s + y)),
    "multi-ring": (8, lambda x, y, s: 14 * y),
}
CROSSING: dict[str, Callable[[float, float, float], float]] = {
    "double-ring/4": lambda x, y, s: y,
    "case-iii/4": lambda x, y, s: y,
    "relay/4": lambda x, y, s: y,
    "relay-q/4": lambda x, y, s: 2 * x + s,
    "reduced/4": lambda x, y, s: 5 * x + s,
    "direct-kv": lambda x, y, s: 4 * y,
    "direct-q": lambda x, y, s: 4 * (2 * x + s),
}  # from one node of four to the other, fp32


class TestBytes:
    @pytest.mark.parametrize("name", FORWARD)
    def test_a_rank_sends_forward(self, name: str) -> None:
        ranks, formula = FORWARD[name]
        schedule = schedule_of(name, ranks)
        assert sent(schedule, size_of(schedule)) == {formula(*units(ranks))}

    @pytest.mark.parametrize("name", BACKWARD)
    def test_a_rank_sends_backward(self, name: str) -> None:
        ranks, formula = BACKWARD[name]
        schedule = schedule_of(name, ranks)
        assert sent(schedule, size_of(schedule), "backward") == {formula(*units(ranks))}

    @pytest.mark.parametrize("name", CROSSING)
    def test_a_rank_sends_to_the_other_node(self, name: str) -> None:
        schedule = schedule_of(name, 8)
        assert sent(schedule, size_of(schedule), crossing=4) == {CROSSING[name](*units(8))}

    def test_gradients_cross_once(self) -> None:
        """KV gradients are added up inside the node: of four partials for an owner one crosses."""
        x, y, s = units(8)
        for name in ("double-ring/4", "relay/4"):
            schedule = schedule_of(name, 8)
            assert sent(schedule, size_of(schedule), "backward", crossing=4) == {2 * y}
        schedule = schedule_of("relay-q/4", 8)
        assert sent(schedule, size_of(schedule), "backward", crossing=4) == {3 * x + 2 * s}

    @pytest.mark.parametrize(
        ("name", "link"),
        [
            ("direct-kv", lambda x, y, s: y),
            ("direct-q", lambda x, y, s: 2 * x + s),
            ("ulysses", lambda x, y, s: (2 * x + y + s) / 8),
            ("sub-sharded/2x2x2", lambda x, y, s: ((2 * x + s) / 2 + y / 2) / 2),
            ("multi-ring", lambda x, y, s: y),
            ("multi-ring-q", lambda x, y, s: 2 * x + s),
        ],
    )
    def test_all_links_of_a_mesh_carry_as_much(self, name: str, link: Callable[[float, float, float], float]) -> None:
        links = (schedule := schedule_of(name, 8)).link_bytes(size_of(schedule))
        assert len(links) == 56
        assert set(links.values()) == {link(*units(8))}

    def test_multi_ring_loads_all_links_in_every_step(self) -> None:
        schedule = schedule_of("multi-ring", 8)
        for step in range(7):
            moves = [move for move in schedule.moves if move.step == step and move.block.kind == "kv"]
            assert len({(move.src, move.dst) for move in moves}) == 56
            assert len(moves) == 56 * 2  # chunks

    def test_kv_heads_are_replicated(self) -> None:
        """Two kv heads on eight ranks: each rank gets the one it needs."""
        schedule = schedule_of("ulysses", 8)
        x, _, s = units(8)
        head = 2 * 2 * 840 * 32 * 4
        assert sent(schedule, size_of(schedule, 8, 2)) == {7 / 8 * (2 * x + s) + 7 * head}

    @pytest.mark.parametrize(
        ("name", "kv_heads", "worst"),
        [
            ("direct-q", 8, 1.5),
            ("direct-kv", 8, 2),
            ("mixed/1x2", 8, 1.25),
            ("direct-kv", 4, 1),
            ("mixed/2x2", 4, 0.75),
        ],
    )
    def test_mixed_evens_out_causal_zigzag(self, name: str, kv_heads: int, worst: float) -> None:
        """PRIOR ART's bytes on the busiest link of a mesh, in X."""
        schedule = schedule_of(name, 8, tr.Causal())
        x, _, s = units(8, 8, kv_heads)
        assert x * worst <= max(schedule.link_bytes(size_of(schedule, 8, kv_heads)).values()) <= x * worst + s

    def test_mirror_images_save_a_quarter_under_causal_zigzag(self) -> None:
        """A ring that turns to rank - 1 drops what early queries do not see; it is chosen."""
        for name in ("usp/2", "double-ring/4", "case-iii/2"):
            whole = make_layout("zigzag", 8, 256)
            both = {way: make_schedule(name, whole, whole, tr.Causal(), way) for way in (1, -1)}
            total = {way: sum(made.link_bytes(size_of(made)).values()) for way, made in both.items()}
            chosen = make_schedule(name, whole, whole, tr.Causal())
            assert total[-1] <= total[1]
            assert sum(chosen.link_bytes(size_of(chosen)).values()) == total[-1]


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
            assert before[1:] == after[1:-1]
            assert after[0].step == before[0].step < after[-1].step
            assert after[-1].step > ends[rank]
            assert {*after[0].q, *after[-1].q} == {*before[0].q}

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


# ---------- names


class TestNames:
    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("rings", "unknown schedule 'rings'; choose one of ring, tokenring, "),
            ("usp", "schedule 'usp': usp/U takes one number, none is given; e.g. usp/2"),
            ("usp/2x2", "schedule 'usp/2x2': usp/U takes one number, 2 are given; e.g. usp/2"),
            ("tiles/2", "schedule 'tiles/2': tiles/AxB takes the numbers A and B, 1 is given; e.g. tiles/2x4"),
            ("ring/2", "schedule 'ring/2': ring takes no parameters, 1 is given; e.g. ring"),
            ("relay", "schedule 'relay': relay/L takes one number, none is given; e.g. relay/4"),
            ("usp/0", "unknown schedule 'usp/0'; "),
            ("usp/2/lately", "schedule 'usp/2/lately': there is no option 'lately'; use late, keep, regather"),
            ("mesh-kv/2", "schedule 'mesh-kv/2': mesh-kv/AxBx... takes 2 or more numbers A and B, 1 is given"),
        ],
    )
    def test_what_no_name_is(self, name: str, says: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^{re.escape(says)}"):
            parse(name)

    @pytest.mark.parametrize(
        ("name", "ranks", "says"),
        [
            ("usp/3", 8, "schedule 'usp/3' on 8 ranks: 3 ranks a group do not divide 8; choose one of usp/2, usp/4"),
            ("tiles/3x2", 8, "schedule 'tiles/3x2' on 8 ranks: 3 × 2 is not 8; choose one of tiles/2x4, tiles/4x2"),
            ("sub-sharded/2x2x3", 8, "schedule 'sub-sharded/2x2x3' on 8 ranks: 2 × 2 × 3 is 12, not 8; choose one of "),
            ("relay/3", 4, "schedule 'relay/3' on 4 ranks: 3 ranks a node do not divide 4; choose one of relay/2"),
            ("usp/3", 5, "schedule 'usp/3' on 5 ranks: 3 ranks a group do not divide 5; none of this family fits"),
        ],
    )
    def test_what_does_not_fit_the_ranks(self, name: str, ranks: int, says: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^{re.escape(says)}"):
            parse(name).make(ranks)
        assert str(misfit(name, ranks)).startswith(says)

    def test_what_does_not_fit_the_workload(self) -> None:
        """Heads, chunks; and each with one that fits."""
        six, whole = Workload(1, 512, 512, 6, 6, 32), make_layout("zigzag", 8, 512)
        assert misfit("ulysses", 8, Workload(1, 512, 512, 8, 2, 32)) is None
        assert misfit("sub-sharded/2x2x2", 8, six, whole, whole) is None
        assert misfit("ulysses", 8, six) == (
            "schedule 'ulysses': 6 query heads over 6 kv heads do not split into 8 equal head groups; "
            "choose one with other head groups, as sub-sharded/UxAxB, or with none"
        )
        assert misfit("multi-ring", 8, None, whole, whole) == (
            "schedule 'multi-ring': 7 pieces do not divide chunks of 32 tokens (layout 'zigzag' of 512); "
            "use fewer pieces or another length"
        )
        assert misfit("bidirectional", 8, pieces=3) == "schedule 'bidirectional' in 3 pieces: use a multiple of 2"
        assert misfit("nothing", 8) is not None

    def test_all_that_is_offered_fits(self) -> None:
        for point in points([*range(1, 10), 16, 24], ("",)):
            size = Workload(1, point.ranks, point.ranks, *point.heads, 8)
            assert misfit(point.name, point.ranks, size) is None, point
            assert parse(point.name).family.name == point.family

    def test_what_is_offered(self) -> None:
        one_node = set(variants(8, Workload(1, 8, 8, 6, 6, 8)))
        assert {"ring", "usp/2", "tiles/2x4", "sub-sharded/2x2x2", "mixed", "multi-ring", "mesh-kv/2x4"} <= one_node
        assert not {"ulysses", "usp/4", "relay/4", "double-ring/4"} & one_node
        two_nodes = set(variants(8, Workload(1, 8, 8, 8, 8, 8), 4))
        assert {"ulysses", "usp/4", "relay/4", "relay-q/4", "double-ring/4", "case-iii/4", "reduced/4"} <= two_nodes
        assert not [name for name in variants(8, Workload(1, 8, 8, 8, 2, 8)) if name.startswith("mixed")]
        assert "mixed/2x2" in variants(8, Workload(1, 8, 8, 8, 4, 8))
        assert "ulysses/2" in variants(4, Workload(1, 8, 8, 8, 8, 8))
        assert "ulysses/2" not in variants(4, Workload(1, 8, 8, 8, 4, 8))  # kv heads would go twice

    def test_contexts_take_them(self) -> None:
        for name in ("ring", "auto", "auto:usp,ring", "auto:usp/2,ulysses", "mixed", "multi-ring/late"):
            tr.ContextParallel(schedule=name)
        with pytest.raises(ConfigurationError, match=r"schedule 'usp/2' on 1 ranks: 2 ranks a group do not divide 1"):
            tr.ContextParallel(schedule="usp/2")
        with pytest.raises(ConfigurationError, match="usp/U takes one number"):
            tr.ContextParallel(schedule="usp")

    def test_a_workload_without_the_heads_is_refused_where_it_is_planned(self) -> None:
        from tokenring.planner.pieces import named_schedule

        whole = make_layout("zigzag", 4, 64)
        with pytest.raises(ConfigurationError, match="6 query heads over 6 kv heads do not split into 4 equal"):
            named_schedule("ulysses", Workload(1, 64, 64, 6, 6, 8), whole, whole, tr.Full())
        assert named_schedule("ulysses", Workload(1, 64, 64, 4, 2, 8), whole, whole, tr.Full()).name == "ulysses"
