"""Plans kept to the HCCL communicators that are advised: what is looked at, what that takes, and packs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from nets import BOTH, clusters, named, setting, workload

import tokenring as tr
from tokenring.lowering.backend_names import bounded, transport_target
from tokenring.lowering.footprint import connections, connections_by_rank, most_connected
from tokenring.lowering.lower import lower_agenda
from tokenring.lowering.target import Target, links
from tokenring.planner.choosing import connections as choosing_connections
from tokenring.planner.choosing.auto import CallToPlan, forecast_call, plan_call
from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.choosing.few_connections import MOST_FOR_FEW, MOST_TRIED, few, queue_seconds
from tokenring.planner.choosing.memory_fallback import over, seconds
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.choosing.planner import LIKE_BEFORE, SERVES, Planner
from tokenring.planner.interconnects.interconnect import Interconnect, full_mesh, switch
from tokenring.planner.simulation import predict as predictions
from tokenring.planner.simulation.predict import Setting, predict
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import contiguous
from tokenring.sequence.workload import Request, Workload

MESH, HOSTS = full_mesh(4, 1.0), clusters(12, nic_gbs=0.25, link_gbs=0.25)  # 48 ranks


def call(net: Interconnect, advised: int | None, *families: str, **more: Any) -> CallToPlan:
    """Over HCCL and its modes; advised: None for what the transport itself advises, 0 for nothing."""
    size = workload(net.world_size, (8, 8), 64)
    asked = over(setting(net, size, BOTH), transport_target("hccl"))
    if advised is not None:
        asked = replace(asked, target=replace(asked.target, advised_connections=advised or None))
    layout = contiguous(net.world_size, size.q_length)
    return CallToPlan(asked, layout, layout, tr.Full(), families, modes=bounded("hccl"), **more)


# ---------- what is looked at: by hand


def candidate(name: str, seconds: float | None, count: int, peak_bytes: int = 0) -> Candidate:
    return Candidate(name, seconds, 0.0, 0.0, 0, peak_bytes, None, "", count, count * 10)


class Tables:
    """Stand-in for simulations: connections, least seconds and seconds of a schedule over a mode."""

    def __init__(self, found: Mapping[tuple[str, str], tuple[int, float, float]]) -> None:
        self.found, self.names = found, {id(target): name for name, target in MODES.items()}
        self.simulated: list[tuple[str, str]] = []

    def _of(self, asked: Setting) -> str:
        return self.names[id(asked.target)]

    def least(self, name: str, setting: Setting) -> tuple[int, float]:
        return self.found.get((name, self._of(setting)), (1000, 0.0, 0.0))[:2]

    def predicted(self, candidate: Candidate, setting: Setting, most_seconds: float) -> Candidate | None:
        key = candidate.name, self._of(setting)
        self.simulated.append(key)
        count, _, seconds = self.found[key]
        nbytes = count * setting.target.connection_bytes
        made = replace(candidate, predicted_seconds=seconds, connections=count, connection_bytes=nbytes)
        return made if seconds <= most_seconds else None


MODES = {
    "channel": Target(connection_bytes=10),
    "pair": Target(connection_bytes=10, channels=1),
    "batch": Target(connection_bytes=100, batching=True),
}
A = candidate("a", 1.0, 100)


def looked_at(
    others: list[Candidate], found: Mapping[tuple[str, str], tuple[int, float, float]], advised: int | None = 60,
    limit: int | None = None, modes: Mapping[str, Target] = MODES,
) -> tuple[tuple[str, str | None] | None, list[tuple[str, str]]]:  # fmt: skip
    """Return what is chosen beside schedule a of 1 s and 100 connections, and what was simulated for it."""
    tables = Tables(found)
    asked = replace(setting(MESH, workload(4), BOTH), target=Target(connection_bytes=10, advised_connections=advised))
    kept = few([A, *others], asked, limit, modes, tables)
    return (None if kept is None else (kept.candidate.name, kept.mode)), tables.simulated


def test_the_first_that_is_fast_enough_ends_the_search() -> None:
    found = {("a", "channel"): (50, 0.0, 1.2), ("a", "batch"): (2, 0.0, 1.0)}
    assert looked_at([], found) == (("a", "channel"), [("a", "channel")])


def test_what_costs_too_much_is_not_taken() -> None:
    found = {("a", "channel"): (50, 0.0, 1.3), ("a", "batch"): (2, 0.0, 1.26)}
    assert looked_at([], found) == (None, [("a", "channel"), ("a", "batch")])


def test_only_what_is_nearly_as_fast_as_it_is_is_looked_at() -> None:
    others = [candidate("b", 1.26, 100), candidate("c", None, 100), candidate("d", 1.26, 4)]
    assert looked_at(others, {("b", "channel"): (50, 0.0, 1.0), ("c", "channel"): (50, 0.0, 1.0)}) == (None, [])


def test_what_queues_alone_rule_out_is_not_simulated() -> None:
    found = {("a", "channel"): (50, 1.3, 1.3), ("a", "batch"): (2, 0.0, 1.1)}
    assert looked_at([], found) == (("a", "batch"), [("a", "batch")])


def test_of_modes_of_pairs_the_first_that_keeps_to_the_advice_stands_for_all() -> None:
    found = {("a", "channel"): (50, 0.0, 1.3), ("a", "pair"): (25, 0.0, 1.0)}
    assert looked_at([], found) == (None, [("a", "channel")])
    assert looked_at([], found | {("a", "channel"): (61, 0.0, 1.3)}) == (("a", "pair"), [("a", "pair")])


def test_few_are_simulated() -> None:
    names = ["a", "b", "c", "d"]
    others = [candidate(name, 1.0, 100) for name in names[1:]]
    chosen, simulated = looked_at(others, {(name, "channel"): (50, 0.0, 1.3) for name in names})
    assert chosen is None and simulated == [("a", "channel"), ("b", "channel")] and len(simulated) == MOST_TRIED


def test_memory_may_not_grow() -> None:
    """100 connections of 10 bytes: 10 of 100 are as much, 11 are more."""
    assert looked_at([], {("a", "batch"): (10, 0.0, 1.0)})[0] == ("a", "batch")
    assert looked_at([], {("a", "batch"): (11, 0.0, 1.0)}) == (None, [])


def test_a_schedule_that_has_few_as_it_is_costs_no_simulation() -> None:
    found = {("a", "channel"): (50, 0.0, 1.15)}
    assert looked_at([candidate("ring", 1.2, 4)], found)[0] == ("a", "channel")  # faster
    assert looked_at([candidate("ring", 1.1, 4)], found) == (("ring", None), [("a", "channel")])
    assert looked_at([candidate("ring", 1.0, 4)], found) == (("ring", None), [])


def test_what_does_not_fit_in_memory_is_passed_over() -> None:
    over_limit = candidate("ring", 1.0, 4, peak_bytes=8)
    assert looked_at([over_limit], {}, limit=8)[0] == ("ring", None)
    assert looked_at([over_limit], {}, limit=7)[0] is None


@pytest.mark.parametrize(("advised", "modes"), [(None, MODES), (100, MODES), (60, {})])
def test_without_advice_with_few_and_without_modes_nothing_is_looked_at(
    advised: int | None, modes: Mapping[str, Target]
) -> None:
    assert looked_at([], {("a", "channel"): (50, 0.0, 1.0)}, advised, modes=modes) == (None, [])


# ---------- by auto


def test_beyond_sixteen_ranks_auto_keeps_to_few_communicators() -> None:
    asked = call(switch(20, 1.0), None, "direct-q")
    free, kept = plan_call(call(switch(20, 1.0), 0, "direct-q")), plan_call(asked)
    assert (free.name, free.transport, free.candidates[0].connections) == ("direct-q", None, 4 * 19)
    assert (kept.name, kept.transport, kept.candidates[0].connections) == ("direct-q", "hccl/batch", 2)
    assert "over transport 'hccl/batch' with 2 communicators (839 MB); else direct-q takes" in kept.reason
    assert "with 76 communicators (3.19 GB) (more than 60 communicators on a rank take gigabytes" in kept.reason
    assert seconds(kept) <= seconds(free) * MOST_FOR_FEW
    assert (kept.candidates[0].connection_bytes or 0) <= (free.candidates[0].connection_bytes or 0)
    assert all(each.reason.startswith("in more communicators: ") for each in kept.candidates[1:] if each.connections)
    whole = predict(kept.schedule, over(asked.setting, asked.modes["hccl/batch"]))  # lowered anew
    first = kept.candidates[0]
    assert (first.predicted_seconds, first.exposed_seconds) == (whole.seconds, whole.exposed_seconds)
    assert (first.peak_bytes, first.connection_bytes) == (whole.peak_bytes, whole.connection_bytes)


def test_it_lowers_nothing_that_was_not_lowered_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes most of the time of planning."""
    counts = []
    for advised in (0, None):
        lowered: list[object] = []

        def lower_counted(*given: Any, seen: list[object] = lowered) -> Any:
            seen.append(None)
            return lower_agenda(*given)

        with monkeypatch.context() as patched:
            patched.setattr(predictions, "lower_agenda", lower_counted)
            plan = plan_call(call(switch(20, 1.0), advised, "direct-q"))
        counts.append((len(lowered), plan.transport))
    assert counts == [(counts[0][0], None), (counts[0][0], "hccl/batch")] and counts[0][0] > 0


def test_up_to_sixteen_ranks_nothing_changes() -> None:
    free, kept = (plan_call(call(switch(16, 1.0), advised, "direct-q")) for advised in (0, None))
    assert str(free) == str(kept) and kept.candidates[0].connections == 60


def test_larger_buffers_than_pairs_take_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two communicators of all ranks would then take more memory than all of pairs."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "2048")
    free, kept = (plan_call(call(switch(20, 1.0), advised, "direct-q")) for advised in (0, None))
    assert str(free) == str(kept)


def test_advice_that_costs_too_much_changes_nothing() -> None:
    """On a mesh both directions of a pair in one queue, and all messages of a rank in one, take much longer."""
    for families in (("direct-q",), ("direct-q", "ring")):
        free, kept = (plan_call(call(full_mesh(8, 1.0), advised, *families)) for advised in (0, 14))
        assert str(free) == str(kept) and (kept.candidates[0].connections or 0) > 14


def test_queues_alone_take_no_longer_than_a_simulation() -> None:
    """And rule out one queue for what goes both ways, where wires are what a schedule waits for."""
    asked = call(full_mesh(8, 1.0), None).setting
    for name in ("ring", "tokenring", "direct-kv", "direct-q"):
        schedule = named(name, 8, asked.workload.q_length)
        free, many = predict(schedule, asked).seconds, name.startswith("direct")
        for mode, target in bounded("hccl").items():
            there = over(asked, target)
            least = queue_seconds(schedule, there)
            assert 0 < least <= predict(schedule, there).seconds * 1.001
            assert not many or mode == "hccl/channel" or least > MOST_FOR_FEW * free


def test_where_one_host_stands_for_all() -> None:
    found = [plan_call(call(HOSTS, advised, "direct-kv")) for advised in (0, None)]
    assert found[0].transport is None and (found[0].candidates[0].connections or 0) > 60
    assert found[1].transport == "hccl/batch" and found[1].candidates[0].connections == 2
    assert seconds(found[1]) <= seconds(found[0]) * MOST_FOR_FEW
    assert found[1].schedule == found[0].schedule and found[1].name == "direct-kv"


def test_forecasts_keep_to_it_too() -> None:
    found = forecast_call(call(HOSTS, None, "direct-kv"))
    assert (found.name, found.transport) == ("direct-kv", "hccl/batch")
    assert found.candidates == plan_call(call(HOSTS, None, "direct-kv")).candidates


# ---------- by name


@pytest.mark.parametrize(
    ("ranks", "name", "buffer_mb", "mode"),
    [
        (20, "direct-q", 200, "hccl/channel"),
        (32, "direct-q", 200, "hccl/pair"),
        (64, "direct-q", 200, "hccl/batch"),
        (64, "direct-q", 4000, None),  # with which two of all ranks take more than 252 of pairs
        (20, "ring", 200, None),
        (16, "direct-q", 200, None),
    ],
)
def test_a_schedule_by_name_keeps_to_few_too(
    monkeypatch: pytest.MonkeyPatch, ranks: int, name: str, buffer_mb: int, mode: str | None
) -> None:
    """Over the first mode in which it does, if its communicators take no more memory."""
    monkeypatch.setenv("HCCL_BUFFSIZE", str(buffer_mb))
    monkeypatch.setattr(choosing_connections, "modes_of", lambda *given: bounded("hccl"))
    monkeypatch.setattr(choosing_connections, "automatic", lambda *given: "hccl")
    plan = Plan(named(name, ranks, ranks), workload(ranks, (8, 8), 1), "asked for")
    made = choosing_connections.within_connections(plan, "auto", cast(Any, "a group"), torch.device("cpu"))
    assert made.transport == mode
    assert made.reason.startswith("asked for" if mode is None else f"asked for; over transport {mode!r}: more than 60")


@pytest.mark.parametrize("transport", ["hccl", "hccl/channel", "hccl/pair", "hccl/batch"])
@pytest.mark.parametrize("name", ["ring", "direct-q", "usp/2"])
def test_connections_are_counted_alike_at_once_and_rank_by_rank(name: str, transport: str) -> None:
    schedule, target = named(name, 6, 6), transport_target(transport)
    some = links(schedule)
    one_by_one = [connections(some, target, rank) for rank in range(6)]
    assert connections_by_rank(some, target, 6) == one_by_one and most_connected(schedule, target) == max(one_by_one)


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


def planned(transport: str | None, most: int | None, limit: int | None = None) -> list[str]:
    """Two packs of one shape, for which rank 0 takes this mode; the reasons. Raises where a pack has no plan."""
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
        ("hccl/batch", 5, None, True),
        ("hccl/channel", 5, None, False),
        (None, 5, None, True),
        ("hccl/batch", None, 10**9, False),
    ],
)
def test_a_mode_that_was_advised_serves_packs(
    transport: str | None, most: int | None, limit: int | None, serves: bool
) -> None:
    """They are not planned anew each step; where another pack may be beyond a limit, it is."""
    assert planned(transport, most, limit) == ["chosen", f"{LIKE_BEFORE}: chosen" if serves else "chosen"]


def test_the_word_says_so() -> None:
    layout = contiguous(4, LENGTH)
    plan = Plan(make_schedule("ring", layout, layout, PACKS[0]), workload(4), "", (), "hccl/pair")
    assert [json.loads(Planner.word(plan, None, serves))[SERVES] for serves in (True, False)] == [True, False]


