"""Plans kept to the HCCL communicators that are advised: which mode is taken, what that may cost, and packs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from nets import BOTH, FREE, clusters, setting, workload

import tokenring as tr
from tokenring.lowering.backend_names import bounded, transport_target
from tokenring.lowering.target import Target
from tokenring.planner.choosing import few_connections
from tokenring.planner.choosing.auto import CallToPlan, forecast_call, plan_call
from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.choosing.few_connections import MOST_FOR_FEW, with_few_connections
from tokenring.planner.choosing.memory_fallback import over, seconds
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.planner.choosing.planner import LIKE_BEFORE, SERVES, Planner
from tokenring.planner.interconnects.interconnect import Interconnect, full_mesh, switch
from tokenring.planner.simulation.predict import predict
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import contiguous
from tokenring.sequence.workload import Request, Workload

MESH, HOSTS = full_mesh(4, 1.0), clusters(12, nic_gbs=2.0, link_gbs=0.25)  # 48 ranks
SLOW = 0.002  # TFLOPS, with which kernels take far longer than transfers


def call(net: Interconnect, advised: int | None, *families: str, tflops: float = FREE, **more: Any) -> CallToPlan:
    """Make a call over HCCL and its modes; advised: None for what the transport itself advises, 0 for nothing."""
    size = workload(net.world_size, (8, 8), 64)
    asked = over(setting(net, size, BOTH, tflops), transport_target("hccl"))
    if advised is not None:
        asked = replace(asked, target=replace(asked.target, advised_connections=advised or None))
    layout = contiguous(net.world_size, size.q_length)
    return CallToPlan(asked, layout, layout, tr.Full(), families, modes=bounded("hccl"), **more)


# ---------- which mode is taken, by hand


MODES = {
    "channel": Target(connection_bytes=10, pair_serial=True),
    "pair": Target(connection_bytes=10, pair_serial=True, channels=1),
    "batch": Target(connection_bytes=100, batching=True),  # which is never taken on advice
}
AS_IT_IS = Target(connection_bytes=10, advised_connections=60, why_few_connections="they are many")
ASKED = replace(setting(MESH, workload(4), BOTH), target=AS_IT_IS)
Found = dict[str, tuple[int, float]]  # by mode: connections, and seconds


def forecast_of(count: int, seconds_taken: float, nbytes: int) -> Forecast:
    first = Candidate("a", seconds_taken, 0.0, 0.0, 0, 0, None, "", count, nbytes)
    other = replace(first, name="b", reason="+5%")
    return Forecast("a", workload(4), "chosen", (first, other, replace(other, predicted_seconds=None, reason="slow")))


def taken(found: Found, count: int = 100, limit: int | None = None) -> tuple[str | None, list[str]]:
    """Return the mode that is taken for a schedule of 1 s and so many connections, and those that were planned over."""
    tried: list[str] = []

    def plan_over(mode: str, name: str) -> Forecast:
        assert name == "a"
        tried.append(mode)
        number, taking = found[mode]
        return forecast_of(number, taking, number * MODES[mode].connection_bytes)

    return with_few_connections(forecast_of(count, 1.0, count * 10), ASKED, limit, MODES, plan_over).transport, tried


@pytest.mark.parametrize(
    ("found", "mode"),
    [
        ({"channel": (50, MOST_FOR_FEW)}, "channel"),  # the first that keeps to the advice
        ({"channel": (50, MOST_FOR_FEW + 0.01), "pair": (25, 1.0)}, "pair"),
        ({"channel": (50, MOST_FOR_FEW + 0.01), "pair": (25, MOST_FOR_FEW + 0.01)}, None),
        ({"channel": (80, 1.0), "pair": (40, 1.05)}, "pair"),  # of which no two ranks used all that they had
        ({"channel": (80, 1.0), "pair": (40, 1.2)}, "channel"),  # which has fewer at least
        ({"channel": (80, 1.0), "pair": (80, 1.0)}, "channel"),
        ({"channel": (100, 1.0), "pair": (100, 1.0)}, None),  # as much memory
    ],
)
def test_the_first_that_keeps_to_the_advice_and_costs_little(found: Found, mode: str | None) -> None:
    assert taken(found) == (mode, list(found))


def test_of_modes_the_first_that_may_keep_to_it_is_planned_over() -> None:
    """Two ranks that send both ways have 4 connections as it is, 2 with one for each channel, 1 with one."""
    assert taken({"channel": (60, 1.0)}, 120) == ("channel", ["channel"])
    assert taken({"pair": (31, 1.0)}, 121) == ("pair", ["pair"])
    assert taken({"pair": (75, 1.0)}, 300) == ("pair", ["pair"])


def test_without_a_reason_nothing_is_planned_again() -> None:
    assert taken({}, 60) == (None, [])
    assert taken({}, limit=1 << 40) == (None, [])


def test_what_does_not_fold_over_a_mode_is_passed_over() -> None:
    def plan_over(mode: str, name: str) -> Forecast:
        if mode == "channel":
            raise tr.ConfigurationError("it does not fold")
        return forecast_of(25, 1.0, 250)

    plan = with_few_connections(forecast_of(100, 1.0, 1000), ASKED, None, MODES, plan_over)
    assert plan.transport == "pair" and [each.reason for each in plan.candidates] == ["", "without 'pair': +5%", "slow"]


# ---------- by auto


def test_beyond_sixteen_ranks_auto_keeps_to_few_communicators() -> None:
    asked = call(switch(20, 1.0), None, "direct-q/pieces1", tflops=SLOW)
    free, kept = plan_call(call(switch(20, 1.0), 0, "direct-q/pieces1", tflops=SLOW)), plan_call(asked)
    assert (free.name, free.transport, free.candidates[0].connections) == ("direct-q/pieces1", None, 4 * 19)
    assert (kept.name, kept.transport, kept.candidates[0].connections) == ("direct-q/pieces1", "hccl/channel", 38)
    assert "over transport 'hccl/channel' with 38 communicators (1.59 GB): without, direct-q/pieces1" in kept.reason
    assert "with 76 communicators (3.19 GB) (more than 64 communicators on a rank take gigabytes" in kept.reason
    assert seconds(kept) <= seconds(free) * MOST_FOR_FEW and kept.schedule == free.schedule
    whole = predict(kept.schedule, over(asked.setting, asked.modes["hccl/channel"]))
    first = kept.candidates[0]
    assert (first.predicted_seconds, first.peak_bytes) == (whole.seconds, whole.peak_bytes)


def test_up_to_sixteen_ranks_nothing_changes() -> None:
    free, kept = (plan_call(call(switch(16, 1.0), advised, "direct-q")) for advised in (0, None))
    assert str(free) == str(kept) and kept.candidates[0].connections == 60


def test_where_pairs_send_one_way_alone_the_mode_with_one_queue_is_taken() -> None:
    """Count 2 for each pair: requests go one way and partials back, each over a communicator of its own anyway."""
    net = switch(40, 1.0)
    size = workload(40, (8, 8), 64)
    layout = contiguous(40, size.q_length)
    asked = over(setting(net, size, BOTH), transport_target("hccl"))
    found = plan_call(CallToPlan(asked, layout, layout, tr.Causal(), ("direct-q/pieces1",), modes=bounded("hccl")))
    assert (found.transport, found.candidates[0].connections) == ("hccl/pair", 39)


def test_advice_that_costs_too_much_changes_nothing() -> None:
    """On a mesh both directions of a pair in one queue take much longer."""
    free, kept = (plan_call(call(full_mesh(8, 1.0), advised, "direct-q")) for advised in (0, 14))
    assert str(free) == str(kept) and (kept.candidates[0].connections or 0) > 14


def test_what_a_mode_may_cost_is_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_connections, "MOST_FOR_FEW", 0.5)
    assert plan_call(call(switch(20, 1.0), None, "direct-q/pieces1", tflops=SLOW)).transport is None


def test_where_one_host_stands_for_all() -> None:
    free, kept = (plan_call(call(HOSTS, advised, "usp/2")) for advised in (0, None))
    assert (free.transport, free.candidates[0].connections) == (None, 98)
    assert (kept.transport, kept.candidates[0].connections) == ("hccl/channel", 50)
    assert seconds(kept) <= seconds(free) * MOST_FOR_FEW and kept.name == free.name == "usp/2"
    forecast = forecast_call(call(HOSTS, None, "usp/2"))
    assert (forecast.name, forecast.transport) == ("usp/2", "hccl/channel")
    assert forecast.candidates == kept.candidates


def test_there_too_it_may_cost_too_much() -> None:
    """Over these modes direct-kv takes 1.6 times as long."""
    found = plan_call(call(HOSTS, None, "direct-kv"))
    assert found.transport is None and found.candidates[0].connections == 188


# ---------- packs


LENGTH = 1024
PACKS = [tr.Causal() & tr.Documents([0, 20, 350, 380, 450, at, LENGTH]) for at in (950, 948)]


class Alone:
    """A transport that has nobody else to tell."""

    rank, world_size = 0, 4

    def __init__(self, target: Target) -> None:
        self.target = target

    def exchange_text(self, text: bytes, what: str) -> list[bytes]:
        return [text]


def planned(transport: str | None, most: int | None, limit: int | None) -> list[str]:
    """Return the reasons of the plans for two packs of one shape, for which rank 0 takes this mode."""
    planner, layout, reasons = Planner(None, 4, MESH, (), limit), contiguous(4, LENGTH), []
    target = replace(transport_target("hccl"), most_connections=most)
    for mask in PACKS:
        request = Request(Workload(1, LENGTH, LENGTH, 4, 2, 16), mask, 0.25, True, torch.device("cpu"))
        chosen = Plan(make_schedule("ring", layout, layout, mask), request.workload, "chosen", (), transport)
        found = planner.together(cast(Any, Alone(target)), request, (layout, layout), lambda plan=chosen: plan)  # type: ignore[misc]
        assert found.transport == transport and found.schedule.mask == mask
        reasons.append(found.reason)
    return reasons


@pytest.mark.parametrize(
    ("transport", "most", "limit", "serves"),
    [
        (None, None, None, True),
        ("hccl/channel", None, None, True),
        ("hccl/batch", None, None, True),
        ("hccl/batch", 5, None, False),
        (None, 5, None, True),
        ("hccl/batch", None, 10**9, False),
    ],
)
def test_a_mode_that_was_advised_serves_packs(
    transport: str | None, most: int | None, limit: int | None, serves: bool
) -> None:
    """They are not planned anew each step; where another pack may be beyond a limit, they are."""
    assert planned(transport, most, limit) == ["chosen", f"{LIKE_BEFORE}: chosen" if serves else "chosen"]


def test_the_word_says_so() -> None:
    layout = contiguous(4, LENGTH)
    plan = Plan(make_schedule("ring", layout, layout, PACKS[0]), workload(4), "", (), "hccl/pair")
    assert [json.loads(Planner.word(plan, None, serves))[SERVES] for serves in (True, False)] == [True, False]
