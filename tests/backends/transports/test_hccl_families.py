"""Every family of schedules on emulated NPUs over the emulated HCCL: both passes, exact, and without deadlock.

What runs always is a sample in which all pairs of circumstances meet, each family at each number of ranks. The whole
sample, of all members, and the grid, which takes ten minutes and more, run by hand: TOKENRING_FULL_GRID=1
(docs/ascend-hccl.md).
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from ascend.hccl_ranks import run_case
from ascend.operators import register
from ascend.ranks import NpuPools
from ascend.schemas import OFFERS
from cases import LIMITS, NAMES, Case, Local, check_bytes, check_exact
from families import Point, length_of, points, sample
from oracle import Attention, relative_error
from ranks import Here
from sampling import FULL_GRID

from tokenring import ContextParallel, attention
from tokenring.schedule.families import FAMILIES, parse

TRANSPORTS = ("hccl", "hccl/channel", "hccl/pair", "hccl/batch")
ENDS = ("hccl", "hccl/batch")  # the most communicators, and the fewest: the others lie between
RANKS = range(2, 9) if FULL_GRID else (2, 3, 4, 6)
CHUNKS = {"zigzag": 2, "contiguous": 1, "striped": 1}
FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": tuple(CHUNKS),
    "mask": ("full", "causal", "window to both sides", "documents", "causal & documents"),
    "dtype": (torch.float32, torch.bfloat16),
    "transport": TRANSPORTS,
    "streams": (None, 1),
}
MOST_OF_ONE_CALL = 1.5  # times its error, in bf16


def case_of(point: Point, layout: str, mask: str, dtype: torch.dtype) -> Case:
    """In bf16 with more rows, so that its errors are no matter of luck."""
    length = length_of(point, CHUNKS[layout], None, 4)
    batch = 1 if dtype == torch.float32 else 4 if point.ranks > 4 else 8
    return Case(point.ranks, point.name, layout, mask, *point.heads, batch, 16, dtype, None, given_length=length)


def met() -> list[Point]:
    """Every family at up to three ranks; of what fits there, at each larger number another fifth; else every one."""
    names = list(FAMILIES)
    found = points(RANKS, ("",))
    few = {each.family for each in found if each.ranks < 4}
    return [
        each
        for each in found
        if each.ranks < 4
        or (each.family not in few and each.ranks == 4)
        or (names.index(each.family) + each.ranks) % 5 == 0
    ]


Row = tuple[Case, str, int | None]


@cache  # and not at the import: ranks import this module, too
def whole_sample() -> list[Row]:
    return [(case_of(*row[:4]), *row[4:]) for row in sample(met(), FACTORS)]


def part_of(rows: list[Row]) -> list[Row]:
    """As few as meet every family at every number of ranks, and what `aspects` says beside; greedily, in order."""
    left, picked = list(rows), list[Row]()
    wanted = set[Any]().union(*map(aspects, rows))
    while wanted:
        picked.append(max(left, key=lambda row: len(aspects(row) & wanted)))
        left.remove(picked[-1])
        wanted -= aspects(picked[-1])
    return picked


def aspects(row: Row) -> set[tuple[Any, ...]]:
    """Pairs of circumstances, and the family with each number of ranks, dtype and end: not its members one by one."""
    case, transport, streams = row
    family = parse(case.schedule).family.name
    ways = {"mask": case.mask_name, "dtype": case.dtype, "transport": transport, "streams": streams,
            "layout": case.layout, "ranks": case.ranks}  # fmt: skip
    found: set[tuple[Any, ...]] = {(family, case.ranks), (family, case.dtype)}
    found |= {(family, transport)} if transport in ENDS else set()
    return found | {(*one, *other) for one, other in combinations(ways.items(), 2)}


@cache
def rows_to_run() -> list[Row]:
    return whole_sample() if FULL_GRID else part_of(whole_sample())


def on_npus(here: Here, case: Case, transport: str, streams: int | None) -> Local:
    _register(here)
    return run_case(here, case, transport, kernel="npu-fusion", streams=streams)


def in_one_call(here: Here, case: Case) -> Attention:
    """The operator over the whole sequence."""
    _register(here)
    cp = ContextParallel(layout="contiguous", kernel="npu-fusion")
    q, k, v, dout = (x.to("npu").requires_grad_(index < 3) for index, x in enumerate(case.inputs()))
    out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
    return Attention(*(x.detach().cpu() for x in (out, lse, *torch.autograd.grad(out, (q, k, v), dout))))


def _register(here: Here) -> None:
    if "operators" not in here.memory:
        register(next(iter(OFFERS)))
        here.memory["operators"] = True


def errors(made: Attention, wanted: Attention) -> dict[str, float]:
    return {name: relative_error(getattr(made, name), getattr(wanted, name)) for name in NAMES}


def limits_of(case: Case, wanted: Attention, npus: NpuPools) -> dict[str, float]:
    """fp32 as on the CPU; bf16 by the error of the operator in one call."""
    if case.dtype == torch.float32:
        return LIMITS
    (alone,) = npus(1)(in_one_call, case)
    found = errors(alone, wanted)
    return {name: MOST_OF_ONE_CALL * found[name] if name != "lse" else LIMITS["lse"] for name in NAMES}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", RANKS)
def test_exact(world_size: int, npus: NpuPools) -> None:
    """All families, kernel and transport of NPUs, every operator watched; bytes as predicted."""
    for row in rows_to_run():
        if row[0].ranks == world_size:
            check_row(npus, *row)


def check_row(npus: NpuPools, case: Case, transport: str, streams: int | None) -> None:
    parts = npus(case.ranks)(on_npus, case, transport, streams)
    check_bytes(case, case.make_schedule(), parts)
    wanted = case.reference()
    found, limits = errors(case.whole(parts), wanted), limits_of(case, wanted, npus)
    worse = {name: (found[name], limits[name]) for name in NAMES if not found[name] <= limits[name]}
    assert not worse, (str(case), transport, streams, worse)


def test_patches_of_a_call_are_not_read_before_they_have_come(npus: NpuPools) -> None:
    """Two patches of one rectangle go in one call while what lies between them is still on its way."""
    case = case_of(Point(8, (6, 6), "tiles", "", "tiles/2x4"), "zigzag", "window to both sides", torch.float32)
    parts = npus(8)(on_npus, case, "hccl", 1)
    check_exact(case.whole(parts), case.reference())


def test_the_sample_meets_all() -> None:
    """Each number of ranks, dtype and mask with every transport; and so does the part of it that runs always."""
    meets_all(whole_sample())
    meets_all(rows_to_run())


def meets_all(rows: list[Row]) -> None:
    found = {(parse(case.schedule).family.name, case.ranks) for case, *_ in rows}
    assert found == {(point.family, point.ranks) for point in met()}
    assert {family for family, _ in found} == set(FAMILIES)
    assert {ranks for _, ranks in found} == set(RANKS)
    for what in ("ranks", "dtype", "mask_name"):
        pairs = {(getattr(case, what), transport, streams) for case, transport, streams in rows}
        assert len({(a, b) for a, b, _ in pairs}) == len({a for a, _, _ in pairs}) * len(TRANSPORTS)
        assert len({(a, c) for a, _, c in pairs}) == len({a for a, _, _ in pairs}) * 2


# ---------- by hand


@cache
def grid(ranks: int) -> list[tuple[Any, ...]]:
    """Members of all families for so many ranks, each in some of all circumstances; any two of these meet."""
    return [(case_of(*row[:4]), *row[4:]) for row in sample(points([ranks], ("", "/late")), FACTORS)]


@pytest.mark.skipif(not FULL_GRID, reason="takes ten minutes: TOKENRING_FULL_GRID=1")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", RANKS)
def test_every_member(world_size: int, npus: NpuPools) -> None:
    for row in grid(world_size):
        check_row(npus, *row)
