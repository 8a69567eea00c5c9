"""Plans kept to the advised communicators, run on emulated NPUs: what is made, packs, and what is left alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from ascend.hccl_ledger import ledger
from ascend.hccl_ranks import fresh, small_case
from ascend.ranks import NpuPools
from cases import Local, check_exact
from oracle import allowed, attention64, relative_error
from patience import patient
from ranks import Here
from test_hccl_environment import A3, RETRY, machine
from test_hccl_modes import call, context

import tokenring as tr
from tokenring.backends.transports import hccl
from tokenring.backends.transports.hccl_environment import ADVISED_COMMUNICATORS, MANY
from tokenring.lowering.backend_names import transport_target
from tokenring.planner.choosing import few_connections
from tokenring.planner.choosing.planner import LIKE_BEFORE
from tokenring.planner.interconnects.interconnect import full_mesh

OFF = "L1:0,L2:0"
CASE = small_case(8, "auto")


class Ran(NamedTuple):
    """One rank's results, what was chosen for it, and the communicators that it then had."""

    local: Local
    name: str
    transport: str | None
    reason: str
    made: int


@contextmanager
def advice(communicators: int, times: float = math.inf, buffer_mb: int = 200) -> Iterator[None]:
    """So many communicators advised, taken up to so many times the time, on an A3 that retries nothing."""
    fresh()
    with pytest.MonkeyPatch.context() as patched, machine(A3, **{RETRY: OFF, "HCCL_BUFFSIZE": str(buffer_mb)}):
        patched.setattr(hccl, "ADVISED_COMMUNICATORS", communicators)
        patched.setattr(few_connections, "MOST_FOR_FEW", times)
        yield


def ran(here: Here, communicators: int, schedule: str, times: float = math.inf, transport: str = "auto") -> Ran:
    with advice(communicators, times), context(CASE, None, schedule=schedule, transport=transport) as cp:
        local, plan = call(cp, CASE)
        return Ran(local, plan.name, plan.transport, plan.reason, len(ledger.communicators))


@pytest.mark.parametrize(
    ("communicators", "mode", "made"), [(28, None, 28), (27, "hccl/channel", 14), (13, "hccl/pair", 7)]
)
def test_auto_takes_a_mode_that_keeps_to_it(npus: NpuPools, communicators: int, mode: str | None, made: int) -> None:
    """Direct-q on eight ranks has four communicators for each pair."""
    found = npus(8)(ran, communicators, "auto:direct-q/pieces1")
    check_exact(CASE.whole([each.local for each in found]), CASE.reference())
    for each in found:
        assert (each.transport, each.made, each.reason) == (mode, made, found[0].reason)
        assert (MANY in each.reason) == (mode is not None)


def test_where_it_costs_more_than_it_may_nothing_changes(npus: NpuPools) -> None:
    for each in npus(8)(ran, 2, "auto:direct-kv", 0.5):
        assert (each.name.partition("/")[0], each.transport) == ("direct-kv", None) and each.made > 2


@pytest.mark.parametrize(("schedule", "transport"), [("auto:direct-q", "hccl"), ("direct-q", "auto")])
def test_what_is_asked_for_by_name_stays(npus: NpuPools, schedule: str, transport: str) -> None:
    """A transport by name is given no other, and of a schedule by name ranks would choose apart."""
    found = npus(8)(ran, 5, schedule, math.inf, transport)
    assert {(each.transport, each.made) for each in found} == {(None, 28)}


def unequal(here: Here) -> Ran:
    """Let rank 1 alone have no advice, and larger buffers."""
    advised, buffer_mb = (100, 4000) if here.rank == 1 else (14, 200)
    with advice(advised, buffer_mb=buffer_mb), context(CASE, None, schedule="auto:direct-q") as cp:
        local, plan = call(cp, CASE)
        return Ran(local, plan.name, plan.transport, plan.reason, len(ledger.communicators))


def test_ranks_whose_buffers_differ_take_the_mode_that_rank_0_takes(npus: NpuPools) -> None:
    found = npus(8)(unequal)
    check_exact(CASE.whole([each.local for each in found]), CASE.reference())
    assert len({(each.name, each.transport, each.made) for each in found}) == 1 and found[0].transport is not None


def test_a3_is_advised_as_all_are_and_limited_with_retries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """HCCL says 5 of retries alone: without them its number is no advice."""
    monkeypatch.setattr("tokenring.backends.transports.hccl_environment._product", lambda: A3)
    for retry, most, advised in ((OFF, None, ADVISED_COMMUNICATORS), ("L1:1", 5, None)):
        monkeypatch.setenv(RETRY, retry)
        for name in ("hccl", "hccl/channel", "hccl/pair", "hccl/batch"):
            found = transport_target(name)
            assert (found.most_connections, found.advised_connections) == (most, advised)
            assert found.why_few_connections and found.one_pair == (name == "hccl/batch" and most is not None)


# ---------- packs


LENGTH, HEADS, DIM = 256, 2, 16


def packs(here: Here, buffer_mb: int) -> list[tuple[str | None, str, float]]:
    """Packs of one shape: mode, reason, and how exact it is, of each; and how many communicators there are."""
    found, net = [], full_mesh(here.world_size, 1.0)
    given: dict[str, Any] = {"schedule": "auto:direct-q", "topology": net, "timeout_seconds": patient(20.0)}
    with advice(2, buffer_mb=buffer_mb), tr.ContextParallel(layout="contiguous", kernel="reference", **given) as cp:
        torch.manual_seed(2)
        q = torch.randn(1, LENGTH, HEADS, DIM)
        for end in (120, 121, 122):
            mask = tr.Causal() & tr.Documents([0, end, LENGTH])
            part: Any = tr.shard(q, cp)
            moved = part.to("npu")
            out = tr.attention(moved, moved, moved, cp, mask=mask)
            want = attention64(q, q, q, torch.zeros_like(q), allowed(mask, LENGTH, LENGTH)).out
            plan = tr.plan(moved, moved, moved, cp, mask)
            found.append((plan.transport, plan.reason, relative_error(out.cpu(), tr.shard(want, cp))))
        found.append((None, str(len(ledger.communicators)), 0.0))
    return found


def test_packs_are_planned_once(npus: NpuPools) -> None:
    for *found, last in npus(4)(packs, 20):
        assert {mode for mode, _, _ in found} == {"hccl/pair"} and all(error < 2e-6 for *_, error in found)
        assert [reason.startswith(LIKE_BEFORE) for _, reason, _ in found] == [False, True, True]
        assert 1 <= int(last[1]) <= 3
