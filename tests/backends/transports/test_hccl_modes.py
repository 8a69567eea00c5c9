"""Plans that take a mode of `hccl` with fewer communicators to keep to a limit, run on emulated NPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from ascend.hccl_ledger import MEGABYTE, ledger
from ascend.hccl_ranks import fresh, small_case
from ascend.ranks import NpuPools
from cases import Case, Local, check_exact
from oracle import Attention
from patience import patient
from ranks import Here

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel, PeerLost, attention, shard
from tokenring.api.inputs import make_request
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.interconnects.interconnect import full_mesh

BUFFER = 40 * MEGABYTE
CASE = small_case(4, "auto")


class Ran(NamedTuple):
    """One rank's results, its plan, and the communicators that it then had."""

    local: Local
    name: str
    transport: str | None
    reason: str
    connections: int | None
    communicators: int


def context(case: Case, limit: int | None, **more: Any) -> ContextParallel:
    net = full_mesh(case.ranks, 1.0)
    given = {"schedule": "auto:ring,direct-q", "topology": net, "memory_limit_bytes": limit, "kernel": "reference"}
    return ContextParallel(layout=case.layout, timeout_seconds=patient(20.0), **{**given, **more})


def call(cp: ContextParallel, case: Case) -> tuple[Local, Plan]:
    q, k, v, dout = (shard(x, cp).to("npu").requires_grad_(i < 3) for i, x in enumerate(case.inputs()))
    out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    found = tr.plan(q, k, v, cp, case.mask)
    return Local(Attention(*(x.detach().cpu() for x in (out, lse, *gradients))), {}), found


def ran(here: Here, limit: int | None, name: str | None) -> Ran:
    """name: of the transport; None: auto. Twice, the second time with what the first left."""
    fresh()
    with context(CASE, limit, **({} if name is None else {"transport": name})) as cp:
        call(cp, CASE)
        local, plan = call(cp, CASE)
        held = len(ledger.communicators)
        made = cp.transport_for(torch.device("npu"))
    assert made is not None
    with pytest.raises(ConfigurationError, match="was closed"):
        made.send(torch.zeros(1, dtype=torch.uint8, device="npu"), 1 - here.rank % 2, "requests", "more")
    return Ran(local, plan.name, plan.transport, plan.reason, plan.candidates[0].connections, held)


def test_a_limit_takes_the_mode_that_fits(npus: NpuPools) -> None:
    """On every rank: the mode's communicators alone are made, as many as the plan says; and its reason says why."""
    unlimited = npus(4)(ran, None, None)
    assert {each.transport for each in unlimited} == {None}
    found = npus(4)(ran, 3 * BUFFER, None)
    check_exact(CASE.whole([each.local for each in found]), CASE.reference())
    assert {each.transport for each in found} == {"hccl/pair"} and len({each.reason for each in found}) == 1
    for each in found:
        assert each.communicators == each.connections and each.communicators * BUFFER <= 3 * BUFFER
        assert "over transport 'hccl/pair', for its 2 communicators (83.9 MB): without, nothing fits in" in each.reason


def refused(here: Here, limit: int, name: str) -> str:
    fresh()
    with context(CASE, limit, transport=name) as cp, pytest.raises(ConfigurationError) as caught:
        call(cp, CASE)
    return str(caught.value)


def test_a_transport_that_was_asked_for_stays(npus: NpuPools) -> None:
    for text in npus(4)(refused, 3 * BUFFER, "hccl"):
        assert "no schedule fits in 126 MB a rank" in text and "a transport with fewer communicators" in text


def loaded(here: Here, text: str, name: str) -> tuple[str | None, int]:
    """A plan that was written down says its mode of `hccl`; whoever names another gets that one."""
    fresh()
    with context(CASE, None, schedule=Plan.from_json(text), transport=name) as cp:
        _, plan = call(cp, CASE)
        return plan.transport, len(ledger.communicators)


def planned_text(here: Here, limit: int) -> str:
    fresh()
    with context(CASE, limit) as cp:
        return call(cp, CASE)[1].to_json()


def test_plans_that_were_saved(npus: NpuPools) -> None:
    text = npus(4)(planned_text, 3 * BUFFER)[0]
    assert npus(4)(loaded, text, "auto") == [("hccl/pair", 2)] * 4
    assert npus(4)(loaded, text, "hccl") == [("hccl/pair", 2)] * 4
    assert npus(4)(loaded, text, "hccl/channel") == [("hccl/pair", 4)] * 4


def fails(here: Here) -> str:
    """Rank 1 fails in the middle of a call in a mode: the others hear of it, and the whole transport is broken."""
    fresh(4.0)
    cp = context(CASE, 3 * BUFFER)
    q, k, v, _ = (shard(x, cp).to("npu") for x in CASE.inputs())
    attention(q, k, v, cp, CASE.mask)
    if here.rank == 1:
        executor = cp.executor(make_request(q, k, v, cp, CASE.mask, None), "forward")
        executor.steps[3] = broken
    else:
        cp.executor(make_request(q, k, v, cp, CASE.mask, None), "forward")
    with pytest.raises((PeerLost, KeyError)) as first:
        attention(q, k, v, cp, CASE.mask)
    with pytest.raises(PeerLost) as again:
        attention(q, k, v, cp, CASE.mask)
    assert again.value.rank == 1
    return type(first.value).__name__


def broken(_: object) -> None:
    raise KeyError("a fault")


def test_what_fails_in_a_mode_breaks_the_transport(npus: NpuPools) -> None:
    with npus.expendable(4) as some:
        assert some(fails) == ["PeerLost", "KeyError", "PeerLost", "PeerLost"]
