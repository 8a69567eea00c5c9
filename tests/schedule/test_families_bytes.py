"""The bytes of every family are those of docs/schedules.md.

X: bytes of a rank's Q or O; Y: of its KV; L: of its lse. P ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from math import gcd

import pytest
import torch
from families import make

import tokenring as tr
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.workload import Workload


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
    "packed/2": (8, lambda x, y, s: 1 / 2 * (2 * x + s) + 7 / 2 * y),
    "packed/4": (8, lambda x, y, s: 3 / 4 * (2 * x + s) + 7 / 4 * y),
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

    @pytest.mark.parametrize(("ranks", "groups"), [(8, 6), (8, 3), (5, 7), (8, 38), (4, 6), (7, 1), (4, 4)])
    def test_packed_heads(self, ranks: int, groups: int) -> None:
        """A line of G head groups cut into P shares: each share has its owner's rows; equal work, whatever G."""
        made = make(f"packed/{groups}", ranks, "contiguous", tr.Full(), 16 * ranks)
        size = Workload(1, 16 * ranks, 16 * ranks, groups, groups, 32)
        assert len(set(made.flops(size).values())) == 1
        x, y, s = 16 * groups * 32 * 4, 2 * 16 * groups * 32 * 4, 16 * groups * 4
        touched = groups + ranks - gcd(groups, ranks)  # (rank, head group) that meet
        own = sum(tile.q.count(block) for tile in made.tiles for block in tile.q if made.owner(block) == tile.rank)
        assert own >= ranks * max(1, groups // ranks)
        rows = groups * ranks - own
        wanted = (ranks - 1) * touched * y / groups + rows * (2 * x + s) / groups
        assert sum(made.link_bytes(size).values()) == pytest.approx(wanted)

    @pytest.mark.parametrize(("ranks", "groups"), [(8, 6), (8, 3), (5, 7), (8, 38), (4, 6), (7, 1), (4, 4)])
    def test_uneven_heads(self, ranks: int, groups: int) -> None:
        """As many bytes as Ulysses would need; nobody has more than one head group beyond anybody else."""
        made = make(f"uneven/{groups}", ranks, "contiguous", tr.Full(), 16 * ranks)
        size = Workload(1, 16 * ranks, 16 * ranks, groups, groups, 32)
        work = made.flops(size)
        each, most = sum(work.values()) / groups, -(-groups // ranks)
        assert set(work.values()) <= {each * (groups // ranks), each * most}
        x, y, s = 16 * groups * 32 * 4, 2 * 16 * groups * 32 * 4, 16 * groups * 4
        links = made.link_bytes(size)
        assert sum(links.values()) == pytest.approx((ranks - 1) * (2 * x + y + s))
        assert max(links.values()) <= most * (2 * x + y + s) / groups
        received = [sum(nbytes for (_, dst), nbytes in links.items() if dst == rank) for rank in range(ranks)]
        busiest = (most * (ranks - 1) * (x + y) + (groups - most) * (x + s)) / groups
        assert max(received) == pytest.approx(busiest)

    def test_uneven_heads_of_two_hosts(self) -> None:
        """Six heads on two hosts of four: three each."""
        work = make("uneven/6", 8, "contiguous", tr.Full(), 128).flops(Workload(1, 128, 128, 6, 6, 32))
        assert [sum(work[rank] > 0 for rank in host) for host in (range(4), range(4, 8))] == [3, 3]

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


@pytest.mark.parametrize(("world_size", "tokens", "layout"), [(4, 1024, "contiguous"), (8, 8192, "zigzag")])
def test_mixed_goes_by_the_rows_that_move(world_size: int, tokens: int, layout: str) -> None:
    """Of no pair of ranks the busier link carries more than where KV always moves."""
    draw = random.Random(world_size)
    ends = sorted({0, tokens, *(draw.randrange(tokens) for _ in range(10))})
    cut, mask = make_layout(layout, world_size, tokens), tr.Causal() & tr.Documents(ends)
    workload = Workload(1, tokens, tokens, 4, 4, 64, torch.bfloat16)
    found, kv = (make_schedule(name, cut, cut, mask).link_bytes(workload) for name in ("mixed/1x1", "direct-kv"))
    for pair in combinations(range(world_size), 2):
        busier, of_kv = (max(each.get(pair, 0), each.get(pair[::-1], 0)) for each in (found, kv))
        assert busier <= of_kv, pair
