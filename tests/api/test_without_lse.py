"""Calls that want no lse: out goes home alone where one rank makes each row, with the same bits and counted bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from copies import copied_as_one
from machines import APART, transport_name
from patience import patient
from program_mutants import edit
from programs import lower_all
from ranks import PEER_SECONDS, Here, RankPools

import tokenring as tr
from tokenring.backends.registry import make_transport
from tokenring.errors import ScheduleError
from tokenring.ir.passes import SEEN_RANKS, without_lse
from tokenring.ir.schedule_data import ATTENTION, ATTENTION_OUT
from tokenring.lowering.program import Fill, Merge, Program
from tokenring.lowering.target import NO_END, Target
from tokenring.proof.replay import replay, replay_schedule
from tokenring.proof.verify import verify_lowered
from tokenring.runtime.agreement import UNWANTED
from tokenring.schedule.families.registry import parse
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import parse_mask
from tokenring.sequence.workload import Workload

LENGTH, DIM = 96, 16
SAYS = "out goes home without its lse"
WITHOUT = ("ulysses", "ulysses/pieces2", "ulysses/2/late", "packed/3", "sub-sharded/2x2x1", "usp/2")
WITH = ("tokenring", "direct-q", "mixed/1x2", "tiles/2x2", "relay-q/2", "reduced/2")  # of which rows meet at home


def made(name: str, mask: str = "causal", world: int = 4) -> Schedule:
    layout = make_layout("zigzag", world, LENGTH)
    return make_schedule(name, layout, layout, parse_mask(mask))


# ---------- the schedule and its proof


@pytest.mark.parametrize("mask", ("full", "causal", "documents(0,20,50,96)"))
@pytest.mark.parametrize("name", WITHOUT)
def test_proved(name: str, mask: str) -> None:
    found = without_lse(made(name, mask)).verify()
    assert found.operator == ATTENTION_OUT
    assert Schedule.parse(str(found)) == found == Schedule.from_json(found.to_json())
    replay_schedule(found, (Target(bundle_bytes=NO_END), Target(early_receives=False, collectives=True)))
    verify_lowered(found, Target(early_receives=False, batching=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("name", WITHOUT)
def test_bytes_are_those_of_out(name: str, dtype: torch.dtype) -> None:
    """Four bytes less for each row and head that goes home, on each link."""
    plain, size = made(name, "full"), Workload(1, LENGTH, LENGTH, 24, 24, DIM, dtype)
    fewer = without_lse(plain).link_bytes(size)
    for link, nbytes in plain.link_bytes(size).items():
        home = [move for move in plain.moves if move.block.kind == "q_partial" and (move.src, move.dst) == link]
        assert nbytes - fewer[link] == 4 * 24 // plain.head_groups * sum(map(plain.moved_rows, home))
    assert fewer != plain.link_bytes(size)


@pytest.mark.parametrize("name", WITH)
def test_what_merges_at_home_keeps_its_lse(name: str) -> None:
    """As it is; and without lse the proof of it refuses."""
    plain = made(name)
    assert without_lse(plain) is plain
    with pytest.raises(ScheduleError, match=r"forward: step \d, rank \d: (merges|adds|computes) .* without its lse"):
        plain.replace(operator=ATTENTION_OUT).verify()


@pytest.mark.parametrize("name", ("ring", "all-gather-kv"))
def test_what_sends_no_results_stays_as_it_is(name: str) -> None:
    plain = made(name)
    assert without_lse(plain) is plain


def test_many_ranks_make_their_own_parts_alone() -> None:
    layout = make_layout("contiguous", SEEN_RANKS + 1, 17 * 4)
    plain = make_schedule("ulysses", layout, layout, parse_mask("full"))
    assert without_lse(plain) is plain


def test_results_that_meet_in_the_programs_are_refused() -> None:
    """A mutant of rank 0's program that merges what has come into rows that are filled, as if more were to come."""
    found, size = without_lse(made("ulysses", "full")), Workload(1, LENGTH, LENGTH, 4, 4, DIM)
    programs = lower_all(found, size, "forward")
    at, merge = next(
        (at, each) for at, each in enumerate(programs[0].instructions)
        if isinstance(each, Merge) and each.into.slot == dict(programs[0].home)["q_partial"]
    )  # fmt: skip
    mutant: Program = edit(programs[0], at, at + 1, Fill("q_partial", merge.into), merge._replace(first=False))
    replay(found, programs, False)
    with pytest.raises(ScheduleError, match=r"rank 0: merges into rows .* of which rank \d has sent results without"):
        replay(found, [mutant, *programs[1:]], False)
    plain = found.replace(operator=ATTENTION)  # with lse such a program is right
    replay(plain, [mutant, *programs[1:]], False)


# ---------- calls


class Sent(NamedTuple):
    out: torch.Tensor
    nbytes: int
    planned: int
    says: bool


def given(heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randn(1, LENGTH - 1, heads, DIM, generator=random).to(dtype) for _ in range(3)]


def attended(*call: Any, lse: bool) -> torch.Tensor:
    out: torch.Tensor = tr.attention(*call, return_lse=True)[0] if lse else tr.attention(*call)
    return out


def called(
    here: Here, name: str, heads: int, dtype: torch.dtype, mask: str, gradients: bool = False, lse: bool = False
) -> Sent:
    cp = here.cp(schedule=name)
    assert cp.transport is not None
    q, k, v = (tr.shard(each, cp, dim=1) for each in given(heads, dtype))
    with torch.set_grad_enabled(gradients):
        plan = tr.plan(q, k, v, cp, mask)
        cp.transport.sent_bytes.clear()
        out = attended(q, k, v, cp, mask, lse=lse)
        sent = sum(cp.transport.sent_bytes.values())
    links = plan.schedule.link_bytes(plan.workload)
    planned = sum(n for (src, _), n in links.items() if src == here.rank)
    return Sent(out, sent, planned, SAYS in str(plan))


CALLS = (
    (2, "ulysses", 4, "full"), (3, "uneven", 4, "causal"), (3, "packed/2", 6, "documents(0,20,50,95)"),
    (4, "ulysses/pieces2", 4, "causal"), (4, "usp/2", 4, "causal"), (4, "auto:ulysses,packed", 4, "full"),
)  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize(("world", "name", "heads", "mask"), CALLS)
def test_bits_and_bytes(ranks: RankPools, world: int, name: str, heads: int, mask: str, dtype: torch.dtype) -> None:
    """The bits of a call with lse, in fewer bytes, as many as planned; with gradients all is as it was."""
    alone = ranks(world)(called, name, heads, dtype, mask)
    asked = ranks(world)(called, name, heads, dtype, mask, lse=True)
    trained = ranks(world)(called, name, heads, dtype, mask, gradients=True)
    for one, other, third in zip(alone, asked, trained, strict=True):
        assert torch.equal(one.out, other.out) and torch.equal(one.out, third.out)
        assert one.nbytes == one.planned < other.nbytes == third.nbytes == third.planned
        assert one.says and not third.says


def together(here: Here, name: str, dtype: torch.dtype) -> bool:
    """Copies made as one, as on a device, give the same bits."""
    with copied_as_one():
        out = called(here, name, 6, dtype, "causal").out
    return torch.equal(out, called(here, name, 6, dtype, "causal", lse=True).out)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("name", ("ulysses", "packed/6", "ulysses/pieces2"))
def test_copies_made_as_one(ranks: RankPools, name: str, dtype: torch.dtype) -> None:
    assert ranks(2)(together, name, dtype) == [True, True]


def differing(here: Here, transport: str, of_users: bool) -> tuple[bool, bool, int, bool]:
    """Rank 1 alone asks for lse, also where lengths are to be agreed on first; then nobody; then there are sinks."""
    assert dist.group.WORLD is not None
    with transport_name(transport) as known:
        own = make_transport(known, dist.group.WORLD, patient(PEER_SECONDS))
    cp = tr.ContextParallel(schedule=parse("ulysses").make(here.world_size) if of_users else "ulysses", transport=own)
    q, k, v = (tr.shard(each, cp, dim=1) for each in given(6, torch.float32))
    begun: list[str] = []
    begin = cp._begin
    cp._begin = lambda request, *rest: (begun.append(str(request.wants_lse)), begin(request, *rest))[1]  # type: ignore[func-returns-value,method-assign]

    def mixed() -> torch.Tensor:
        return attended(q, k, v, cp, lse=here.rank == 1)

    with torch.no_grad():
        first = mixed()
        whole, lse = tr.attention(q, k, v, cp, return_lse=True)
        found_lse = tr.attention(q, k, v, cp, return_lse=True)[1] if here.rank == 1 else (mixed(), lse)[1]
        begun.clear()
        found = mixed()
        agreed = len(begun)
        same = torch.equal(found, whole) and torch.equal(found_lse, lse) and torch.equal(first, whole)
        after = torch.equal(tr.attention(q, k, v, cp), whole)
        begun.clear()
        tr.attention(q, k, v, cp, sinks=torch.zeros(6))
    own.close()
    return same, after, agreed, begun == ["True"]


@pytest.mark.parametrize("of_users", (False, True), ids=("named", "scheme"))
@pytest.mark.parametrize("transport", ("shm", "gloo", APART))
def test_ranks_that_differ_in_it_make_one_call(ranks: RankPools, transport: str, of_users: bool) -> None:
    assert ranks(3)(differing, transport, of_users) == [(True, True, 2, True)] * 3


def refusing_alone(here: Here, kind: str) -> tuple[str, bool]:
    """Rank 1 makes another call than one without lse; the next call of each rank is the same one again."""
    cp = here.cp(schedule="ulysses")
    q, k, v = (tr.shard(each, cp, dim=1) for each in given(6, torch.float32))
    with torch.no_grad():
        whole = tr.attention(q, k, v, cp)
        odd = here.rank == 1
        value = v[..., :3, :] if odd and kind == "refusal" else v
        with torch.set_grad_enabled(odd and kind == "gradients"), pytest.raises(tr.ConfigurationError) as error:
            tr.attention(q, k, value, cp, sinks=torch.zeros(6) if odd and kind == "sinks" else None)
        return str(error.value), torch.equal(tr.attention(q, k, v, cp), whole)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("refusal", "rank 1 refused: k and v"), ("gradients", "gradients enabled: ranks 0, 2"), ("sinks", "sinks: ranks")],
)
def test_a_rank_that_makes_another_call_is_heard_of(ranks: RankPools, kind: str, says: str) -> None:
    """Nobody makes the call again, as that rank would not."""
    found = ranks(3)(refusing_alone, kind)
    assert all(says in text for text, _ in (found[0], found[2])) and all(after for _, after in found)


def test_a_call_of_another_size_is_still_refused(ranks: RankPools) -> None:
    for text in ranks(2)(another):
        assert "scale: rank 0: 0.5; rank 1: 0.25" in text and UNWANTED not in text


def another(here: Here) -> str:
    """Scales that differ, and one rank wants lse."""
    cp = here.cp(schedule="ulysses")
    q, k, v = (tr.shard(each, cp, dim=1) for each in given(4, torch.float32))
    with torch.no_grad(), pytest.raises(tr.ConfigurationError) as error:
        attended(q, k, v, cp, None, (0.5, 0.25)[here.rank], lse=here.rank == 0)
    return str(error.value)


def test_a_given_schedule_and_plan(ranks: RankPools) -> None:
    assert ranks(2)(of_users) == [(True, True)] * 2


def of_users(here: Here) -> tuple[bool, bool]:
    """A Schedule and a Plan that users give: without lse too, and proved so; one without lse trains all the same."""
    found, layout = [], make_layout("zigzag", 2, LENGTH)
    own = make_schedule("ulysses", layout, layout, parse_mask("full"))
    random = torch.Generator().manual_seed(7)
    whole = [torch.randn(1, LENGTH, 4, DIM, generator=random) for _ in range(3)]
    q, k, v = (tr.shard(each, here.base, dim=1) for each in whole)
    for asked in (own, replace(tr.plan(q, k, v, here.base), schedule=own)):
        cp = here.cp(schedule=asked)
        with torch.no_grad():
            out, lean = tr.attention(q, k, v, cp), tr.plan(q, k, v, cp).schedule.operator == ATTENTION_OUT
        found.append(lean and torch.equal(out, tr.attention(q, k, v, cp)))
    one, other = (trained(here.cp(schedule=each), q, k, v) for each in (without_lse(own), own))
    return found[0] and all(map(torch.equal, one, other)), found[1]


def trained(cp: tr.ContextParallel, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = of = [each.detach().requires_grad_() for each in given]
    return torch.autograd.grad(tr.attention(q, k, v, cp).square().sum(), of)
