"""Schedules that a call names: many ranks make their own part alone; programs and refusals are those of the whole."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Local, check_exact, compute
from ranks import Here, RankPools

import tokenring as tr
from tokenring.api import arguments
from tokenring.api.arguments import WHOLE_RANKS, not_chosen
from tokenring.errors import TokenRingError
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.lower import lower
from tokenring.lowering.target import APART, contacts
from tokenring.runtime import message_groups
from tokenring.schedule.names import named_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import Layout, make_layout
from tokenring.sequence.workload import Request, Workload

RANKS = 18


def asked(
    name: str, ranks: int = RANKS, layout: str = "zigzag", mask: tr.Mask | None = None, pieces: int | None = None,
    wire: str | None = None, length: int = 64, heads: int = 18,
) -> tuple[Schedule, Request, Layout]:  # fmt: skip
    made = make_layout(layout, ranks, ranks * length)
    size = Workload(1, made.length, made.length, heads, heads, 32, torch.bfloat16)
    request = Request(size, tr.Causal() if mask is None else mask, 1.0, True, torch.device("cpu"))
    return not_chosen(name, request, (made, made), pieces, wire).schedule, request, made


@pytest.mark.parametrize(
    ("name", "layout", "pieces"),
    [
        ("ring", "contiguous", None), ("tokenring", "contiguous", None), ("tokenring", "striped", None),
        ("usp/2", "zigzag", None), ("usp/9", "zigzag", None), ("ulysses", "zigzag", None), ("direct-kv", "zigzag", 2),
        ("double-ring/3", "zigzag", None), ("ring/late", "contiguous", None), ("mesh-q/6x3/keep", "zigzag", None),
    ],
)  # fmt: skip
def test_programs_are_those_of_the_whole(name: str, layout: str, pieces: int | None) -> None:
    for rank in (0, 5, RANKS - 1):
        found, request, made = asked(name, layout=layout, pieces=pieces)
        whole = named_schedule(name, request.workload, made, made, request.mask, pieces)
        for direction, target in zip(PASSES, APART, strict=True):
            mine = lower(found, rank, direction, request.workload, target)
            assert mine == lower(whole, rank, direction, request.workload, target)
            assert contacts(found, target, (direction,)) == contacts(whole, target, (direction,))
        assert found.is_in_parts and found.name == whole.name
        assert found == whole


def test_few_ranks_make_all_of_it() -> None:
    """Which takes no longer, and needs no code for parts."""
    assert not asked("ring", WHOLE_RANKS)[0].is_in_parts and asked("ring", WHOLE_RANKS + 1)[0].is_in_parts


def test_where_parts_are_not_known_the_whole_is_made() -> None:
    assert not asked("ring", mask=tr.SlidingWindow(8))[0].is_in_parts
    assert not asked("ring/late/pieces2")[0].is_in_parts
    found = asked("ring", wire="mxfp8")[0]
    assert not found.is_in_parts and found.codecs


@pytest.mark.parametrize(
    ("name", "pieces", "heads", "says"),
    [
        ("ulysses", None, 8, "8 query heads over 8 kv heads do not split into 18 equal head groups"),
        ("direct-kv", 7, 18, "7 pieces do not divide chunks of 32 tokens"),
        ("usp/4", None, 18, "4 ranks a group do not divide 18; choose one of usp/2, usp/3, usp/6, usp/9"),
        ("no-such", None, 18, "unknown schedule 'no-such'"),
        ("ring/pieces5", None, 18, "5 pieces do not divide chunks"),
    ],
)
def test_refusals_are_the_same(name: str, pieces: int | None, heads: int, says: str) -> None:
    with pytest.raises(TokenRingError) as caught:
        asked(name, pieces=pieces, heads=heads)
    made = make_layout("zigzag", RANKS, RANKS * 64)
    size = Workload(1, made.length, made.length, heads, heads, 32, torch.bfloat16)
    with pytest.raises(type(caught.value)) as whole:
        named_schedule(name, size, made, made, tr.Causal(), pieces)
    assert str(caught.value) == str(whole.value) and says in str(caught.value)


def run_large(here: Here, case: Case) -> tuple[Local, list[str], bool]:
    """Attend as one of very many ranks; also what ranks told each other, and whether the schedule stays in parts."""
    with pytest.MonkeyPatch.context() as patch:
        for module, limit in ((message_groups, "COUNTED_RANKS"), (arguments, "WHOLE_RANKS")):
            patch.setattr(module, limit, 1)
        transport, told = here.transport("shm"), list[str]()
        assert transport is not None
        exchange = transport.exchange

        def exchanged(payload: bytes, what: str) -> list[bytes]:
            told.append(what)
            return exchange(payload, what)

        patch.setattr(transport, "exchange", exchanged)
        cp = here.cp(layout=case.layout, schedule=case.schedule, transport=transport)
        found = compute(cp, case)
        q, k, v = (tr.shard(x, cp) for x in case.inputs()[:3])
        return found, told, tr.plan(q.requires_grad_(), k, v, cp, case.mask).schedule.is_in_parts


@pytest.mark.parametrize("name", ["tokenring", "usp/2"])
def test_ranks_tell_each_other_which_channels_they_use(name: str, ranks: RankPools) -> None:
    """As above 64 ranks, where none knows the whole schedule."""
    case = Case(4, name, "zigzag", "causal", 4, 2, 2, 16, torch.float32, None)
    found = ranks(4)(run_large, case)
    check_exact(case.whole([local for local, _, _ in found]), case.reference())
    assert all(told.count("the connections") == 2 and parts for _, told, parts in found)  # of both passes
