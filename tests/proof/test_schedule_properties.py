"""Whatever the layout, the mask and the placement: what is built is proved, exact and without anything needless."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from random import Random

import pytest
import torch
from bases import bases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import check_both_passes

from tokenring.errors import ScheduleError
from tokenring.ir.passes import fuse, order, prune
from tokenring.ir.schedule_data import Move, Tile
from tokenring.lowering.exact_rows import exact
from tokenring.proof.verify import verify
from tokenring.schedule import routes
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import Pair, Scheme, build, dense
from tokenring.sequence.layout import Layout, contiguous, striped
from tokenring.sequence.mask import Causal, Documents, Full, Mask, SlidingWindow
from tokenring.sequence.workload import Workload

STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)

BASES = bases()


@st.composite
def layouts(draw: st.DrawFn, world_size: int, chunk_length: int) -> Layout:
    """Equal chunks, in one piece or striped, dealt to the ranks at random."""
    each = draw(st.integers(1, 3))
    length = world_size * each * chunk_length
    whole = draw(st.sampled_from([contiguous, striped]))(world_size, length, each)
    owners = draw(st.permutations([rank for rank in range(world_size) for _ in range(each)]))
    return Layout("dealt", world_size, length, whole.chunks, tuple(owners))


def masks(length: int) -> st.SearchStrategy[Mask]:
    ends = st.lists(st.integers(0, length), min_size=1, max_size=4)
    simple = st.one_of(
        st.just(Full()),
        st.just(Causal()),
        st.builds(SlidingWindow, st.integers(-1, length), st.integers(-1, length)),
        ends.map(lambda found: Documents([0, *sorted(found)])),
    )
    return st.lists(simple, min_size=1, max_size=2).map(lambda parts: reduce(and_, parts))


@st.composite
def placements(draw: st.DrawFn, world_size: int) -> Callable[[Pair], int]:
    """At the q owner, at the kv owner, or at any third rank; a function of both owners."""
    ranks = range(world_size)
    anywhere = st.integers(0, world_size - 1)
    chosen = {
        (q, kv): draw(st.one_of(st.just(q), st.just(kv), anywhere) if draw(st.booleans()) else st.just(q))
        for q in ranks
        for kv in ranks
    }
    return lambda pair: chosen[pair.q_owner, pair.kv_owner]


GATHERS = {
    "direct": (routes.direct, routes.return_direct),
    "all to all": (routes.all_to_all, routes.return_direct),
    "ring": (routes.ring(1), routes.follow(routes.ring(1))),
    "ring back": (routes.ring(-1), routes.return_direct),
}


@st.composite
def plans(draw: st.DrawFn, gathers: tuple[str, ...] = ("direct",)) -> tuple[Scheme, Layout, Layout, Mask]:
    world_size = draw(st.integers(1, 6))
    pieces = st.sampled_from([1, 2, 4])
    q_pieces, kv_pieces = draw(pieces), draw(pieces)
    chunk_length = max(q_pieces, kv_pieces) * draw(st.integers(1, 2))
    q_layout = draw(layouts(world_size, chunk_length))
    kv_layout = draw(layouts(world_size, chunk_length)) if draw(st.booleans()) else q_layout
    gather_q, return_q = GATHERS[draw(st.sampled_from(gathers))]
    gather_kv, return_kv = GATHERS[draw(st.sampled_from(gathers))]
    scheme = Scheme(
        "drawn", draw(placements(world_size)), gather_q, gather_kv, return_q, return_kv,
        head_groups=draw(st.sampled_from([1, 1, 2])), q_pieces=q_pieces, kv_pieces=kv_pieces,
        keep=frozenset(draw(st.sets(st.sampled_from(["q", "kv"])))),
        together=draw(st.booleans()), slack=draw(st.sampled_from([None, 0, 2])),
    )  # fmt: skip
    if q_layout.length != kv_layout.length:
        return scheme, q_layout, kv_layout, Full()  # other masks compare positions of one sequence
    return scheme, q_layout, kv_layout, draw(masks(q_layout.length))


Plan = tuple[Scheme, Layout, Layout, Mask]
WIDE = ("direct", "all to all", "ring", "ring back")


def visible_pairs(schedule: Schedule) -> dict[tuple[int, int, int], int]:
    """How often the tiles compute each visible (head group, q position, kv position)."""
    counted: dict[tuple[int, int, int], int] = defaultdict(int)
    for tile in schedule.tiles:
        for q in tile.q:
            for kv in tile.kv:
                rows, cols = range(*schedule.positions(q)), range(*schedule.positions(kv))
                for patch in schedule.mask.region(schedule.positions(q), schedule.positions(kv)):
                    for i in range(patch.rows):
                        for j in patch.columns_of(i):
                            counted[tile.heads, rows[patch.row0 + i], cols[patch.col0 + j]] += 1
    return dict(counted)


def with_whole_units(schedule: Schedule) -> Schedule:
    """The same, with moves of all rows."""
    return schedule.replace(moves=tuple(move._replace(rows=None) for move in schedule.moves))


@STEADY
@given(plans())
def test_dense_and_pruned_compute_the_same(plan: Plan) -> None:
    scheme, q_layout, kv_layout, mask = plan
    whole = dense(scheme, q_layout, kv_layout, mask)
    pruned = build(scheme, q_layout, kv_layout, mask)
    wanted = {
        (heads, q, kv): 1
        for q in range(q_layout.length)
        for kv in range(kv_layout.length)
        if mask.allows(q, kv)
        for heads in range(scheme.head_groups)
    }
    assert visible_pairs(whole) == visible_pairs(pruned) == wanted
    assert set(with_whole_units(pruned).moves) <= set(whole.moves)


@STEADY
@given(plans(WIDE))
def test_what_is_built_is_proved(plan: Plan) -> None:
    """All programs of both passes are replayed as well."""
    schedule = build(*plan)
    assert schedule.verify() is schedule


@settings(STEADY, max_examples=20)
@given(plans(WIDE), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_programs_compute_each_pair_once_and_bring_it_home(plan: Plan, dtype: torch.dtype, early: bool) -> None:
    schedule = build(*plan)
    groups = schedule.head_groups
    size = Workload(1, schedule.q_layout.length, schedule.kv_layout.length, groups, groups, 2, dtype)
    check_both_passes(schedule, size, early_receives=early)


@STEADY
@given(plans(WIDE))
def test_passes_are_idempotent(plan: Plan) -> None:
    schedule = build(*plan)
    assert prune(schedule) == order(schedule) == schedule
    passed = order(prune(fuse(order(dense(*plan)))))  # whatever the order of what was built
    assert passed == with_whole_units(schedule)
    assert exact(exact(passed)) == exact(passed)
    assert schedule in (passed, exact(passed))


def check_needed(schedule: Schedule, tiles: Sequence[Tile], moves: Sequence[Move]) -> None:
    """Without any one of these, verify refuses the schedule."""
    mutants: list[tuple[Tile | Move, Schedule]] = [
        (tile, schedule.replace(tiles=tuple(each for each in schedule.tiles if each is not tile))) for tile in tiles
    ]
    mutants += [
        (move, schedule.replace(moves=tuple(each for each in schedule.moves if each is not move))) for move in moves
    ]
    for item, mutant in mutants:
        try:
            verify(mutant)
        except ScheduleError:
            continue
        pytest.fail(f"{item} is superfluous")


@STEADY
@given(plans(WIDE), st.randoms(use_true_random=False))
def test_nothing_is_superfluous(plan: Plan, random: Random) -> None:
    """Without any one tile or any one move a pruned schedule is refused."""
    schedule = build(*plan)
    tiles, moves = schedule.tiles, schedule.moves
    check_needed(schedule, random.sample(tiles, min(3, len(tiles))), random.sample(moves, min(5, len(moves))))


@pytest.mark.parametrize("base", BASES)
def test_nothing_is_superfluous_in_any_place(base: str) -> None:
    check_needed(BASES[base], BASES[base].tiles, BASES[base].moves)
