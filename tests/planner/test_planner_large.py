"""Many ranks: one host that stands for all is right where it is asked, limits and chunks count, masks that prune."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from nets import BOTH, call, clusters, named, setting, workload

import tokenring as tr
from tokenring.backends.interfaces import Transport
from tokenring.display.units import mb_text
from tokenring.errors import ConfigurationError, MemoryLimitError
from tokenring.ir.schedule_data import Pass, ScheduleData
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.lower import lower
from tokenring.lowering.target import Link, Target, links
from tokenring.planner.bounds.mask_density import is_even, most_of_own_rows
from tokenring.planner.choosing import auto, checks
from tokenring.planner.choosing.auto import CallToPlan, forecast_call, plan_call, plan_or_forecast
from tokenring.planner.choosing.folded_world import Figures
from tokenring.planner.choosing.plan import Forecast
from tokenring.planner.choosing.scale_out import HOPELESS, Task, figures
from tokenring.planner.simulation.predict import predict
from tokenring.runtime import message_groups
from tokenring.runtime.message_groups import connect
from tokenring.schedule import size_limits
from tokenring.schedule.names import schedule_in_parts
from tokenring.schedule.own_part import OwnParts
from tokenring.sequence.layout import make_layout
from tokenring.sequence.workload import Workload

FEW = ("usp/4", "double-ring/4", "relay/4", "ring")
STRAIGHT = ("ring", "tokenring", "bidirectional", "usp/8", "double-ring/8", "relay/8", "reduced/8")


def large_call(hosts: int = 16, mask: tr.Mask | None = None, layout: str = "zigzag", **changes: object) -> CallToPlan:
    """Of 4 ranks a host."""
    size = workload(4 * hosts, (8, 8), 512)
    return call(setting(clusters(hosts), size, tflops=1.0), mask or tr.Causal(), layout, **{"families": FEW, **changes})


# ---------- the straight line


@pytest.mark.parametrize("name", STRAIGHT)
def test_the_straight_line(name: str) -> None:
    """On 2 and 4 hosts and drawn out, against all of 16 hosts of 8 folded."""
    asked = Task(setting(clusters(16, 8), workload(128, (8, 8), 512), tflops=1.0), share=0.5)
    whole, line = (figures(name, each, 2, float("inf")) for each in (asked, replace(asked, most_tiles=0)))
    assert whole is not None and line is not None
    for what, tolerance in (("seconds", 1e-3), ("compute_seconds", 1e-6), ("worst_wire_bytes", 1e-6)):
        assert getattr(line, what) == pytest.approx(getattr(whole, what), rel=tolerance), what
    most = 1.2 if name.startswith("reduced") else 1.0  # partials of other hosts come in, but not of all at once
    assert whole.peak_bytes * (1 - 1e-6) <= line.peak_bytes <= whole.peak_bytes * most * (1 + 1e-6)


def test_a_line_through_one_point_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: the larger of the two worlds alone is something else."""
    asked = Task(setting(clusters(16, 8), workload(128, (8, 8), 512), tflops=1.0), share=0.5)
    whole = figures("double-ring/8", asked, 2, float("inf"))
    monkeypatch.setattr(Figures, "grown", lambda self, larger, times: larger)
    other = figures("double-ring/8", replace(asked, most_tiles=0), 2, float("inf"))
    assert whole is not None and other is not None
    assert other.seconds != pytest.approx(whole.seconds, rel=0.01)


FOLDED = "one host stands for all"


def few_hosts(hosts: int, **changes: Any) -> CallToPlan:
    """Return a call of 12 ranks a host."""
    size = workload(12 * hosts, (8, 8), 32)
    changes = {"mask": tr.Causal(), "layout": "zigzag", "families": ("double-ring/12", "ring"), **changes}
    return call(setting(clusters(hosts, 12), size, tflops=1.0), **changes)


def test_one_of_few_hosts_stands_for_all_where_it_shows_all() -> None:
    asked = few_hosts(4)
    plan = plan_call(asked)
    assert FOLDED in plan.reason
    exact = predict(plan.schedule, asked.setting)  # of two chunks a rank the host that stands for all has one
    assert plan.candidates[0].predicted_seconds == pytest.approx(exact.seconds, rel=0.1)


class _OfAllRanks(Exception):
    """All ranks are about to be simulated, which takes tens of seconds."""


@pytest.mark.parametrize(
    ("hosts", "changes"),
    [
        (3, {}),
        (2, {}),
        (4, {"mask": tr.SlidingWindow(64, 0)}),
        (4, {"layout": "contiguous"}),  # with a causal mask the last ranks compute most
        (4, {"memory_limit_bytes": 1 << 40}),
        (4, {"everything": True}),
    ],
)
def test_one_of_few_hosts_does_not_stand_for_what_it_does_not_show(
    monkeypatch: pytest.MonkeyPatch, hosts: int, changes: dict[str, Any]
) -> None:
    def judge(*given: Any) -> None:
        raise _OfAllRanks

    monkeypatch.setattr(auto, "judge", judge)
    monkeypatch.setattr(auto, "promising", lambda names, *rest: (names, []))
    with pytest.raises(_OfAllRanks):
        plan_call(few_hosts(hosts, **changes))


def test_hopeless_is_nothing() -> None:
    asked = Task(setting(clusters(16), workload(64), tflops=1.0))
    found = figures("ring", asked, 2, float("inf"))
    assert found is not None
    assert figures("ring", asked, 2, found.seconds * 0.99) is None
    assert figures("ring", asked, 2, found.seconds * 1.01) == found


# ---------- forecasts


@pytest.mark.parametrize(("passes", "says"), [(BOTH[:1], "its busiest wire ("), (BOTH, "the busiest wire of each pa")])
def test_what_binds_a_forecast(passes: tuple[Pass, ...], says: str) -> None:
    """Which wire it is, one host that stands for all does not show."""
    asked = setting(clusters(80), workload(320, (8, 8), 512), passes, tflops=1e6)
    found = plan_or_forecast(call(asked, tr.Causal(), families=("ring",)))
    assert found.candidates[0].reason.startswith(f"the fastest, bound by {says}")


def test_a_forecast() -> None:
    found = plan_or_forecast(large_call(hosts=80, families=("relay/4", "double-ring/4")))
    assert isinstance(found, Forecast)
    first, *others = [each for each in found.candidates if each.predicted_seconds is not None]
    assert first.name == found.name and first.reason.startswith("the fastest, bound by ")
    assert first.reason.removeprefix("the fastest") in found.reason
    assert all((each.predicted_seconds or 0) >= (first.predicted_seconds or 0) for each in others)
    assert found.reason.startswith(f"{found.name}: ")
    assert f"; next {others[0].name} with " in found.reason
    assert "one host stands for all" in found.reason and "share of all pairs" not in found.reason


def test_a_limit_takes_what_fits_however_slow() -> None:
    """What does not fit does not make others hopeless."""
    free = forecast_call(large_call())
    sizes = {each.name: each.peak_bytes for each in free.candidates if each.peak_bytes is not None}
    slow = {each.name for each in free.candidates if each.reason == f"over {HOPELESS} × as slow"}
    assert slow, "nothing here is so slow that the test shows anything"
    limit = min(sizes.values()) - 1
    found = forecast_call(large_call(memory_limit_bytes=limit))
    assert found.name in slow
    assert (found.candidates[0].peak_bytes or 0) <= limit
    lost = next(each for each in found.candidates if each.name == free.name)
    assert lost.reason.endswith(f"a rank, more than the limit of {mb_text(limit)}")
    fitting = [each for each in found.candidates if each.peak_bytes is not None and each.peak_bytes <= limit]
    assert f"; next {fitting[1].name} with " in found.reason if len(fitting) > 1 else "; next" not in found.reason


def test_a_limit_that_nothing_meets_names_the_smallest() -> None:
    every = [forecast_call(large_call(families=(name,))) for name in ("ring", "relay/4", "usp/4")]
    least = min(each.candidates[0].peak_bytes or 0 for each in every)
    with pytest.raises(ConfigurationError) as refused:
        forecast_call(large_call(memory_limit_bytes=1000, families=("usp/4", "ring", "relay/4")))
    assert f"no schedule fits in 1 kB a rank; the smallest needs {mb_text(least)}: raise" in str(refused.value)


def test_nothing_can_be_planned() -> None:
    with pytest.raises(ConfigurationError, match="for so many ranks: usp/8: not planned: schedule 'usp/8' does not do"):
        forecast_call(large_call(families=("usp/8",)))


class _Asked(Exception):
    """Something is about to be reckoned."""


@pytest.mark.parametrize(
    ("hosts", "changes", "says"),
    [
        (64, {"mask": tr.SlidingWindow(64)}, None),  # 256 ranks are not too many to make all
        (80, {}, None),
        (80, {"mask": tr.SlidingWindow(64)}, r"auto. with mask window\(64,0\) needs a schedule of 320 ranks.*: use"),
        (80, {"target": Target(bundle_bytes=1)}, "auto. over this transport needs a schedule of 320 ranks"),
        (1040, {}, "at most 4,096 ranks in a job, not 4,160: use smaller groups"),
    ],
)
def test_what_every_rank_would_have_to_make_whole_is_refused(
    hosts: int, changes: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is reckoned or made."""

    def forecast(*_: object, **__: object) -> None:
        raise _Asked

    monkeypatch.setattr(auto, "_forecast", forecast)
    asked = large_call(hosts=hosts, mask=changes.get("mask"))
    asked = replace(asked, setting=replace(asked.setting, target=changes.get("target", asked.setting.target)))
    with pytest.raises(_Asked if says is None else ConfigurationError, match=says):
        plan_call(asked)


def test_modes_that_need_all_are_not_for_so_many_ranks() -> None:
    """A limit is what is refused, and not a mode that nobody asked for."""
    modes = {"hccl/batch": transport_target("hccl/batch")}
    asked = large_call(hosts=80, families=("usp/4",), memory_limit_bytes=1000, modes=modes)
    with pytest.raises(MemoryLimitError, match="no schedule fits"):
        plan_call(replace(asked, setting=replace(asked.setting, target=transport_target("hccl"))))


def test_a_schedule_without_parts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'ring/late/pieces2' has to be made whole.* of 320 ranks.*: use sma"):
        plan_call(large_call(hosts=80, families=("ring/late/pieces2",)))


@pytest.mark.parametrize("name", ["usp/4", "ring"])
def test_a_large_job_makes_no_schedule_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 plans, another makes its part by that word; programs and links are those of the whole.

    Of 64 ranks, as if these were too many.
    """
    for module in (checks, size_limits):
        monkeypatch.setattr(module, "MADE_RANKS", 16)
    monkeypatch.setattr(message_groups, "COUNTED_RANKS", 16)
    asked = large_call(families=(name,))
    plan = plan_call(asked)
    with pytest.raises(ConfigurationError, match=r"a plan of 64 ranks is written with each move.*schedule='"):
        plan.to_json()
    size, layout = asked.setting.workload, asked.q_layout
    told = schedule_in_parts(plan.name, size, layout, layout, asked.mask, direction=plan.direction)
    whole = vars(told)["_parts"].whole()
    monkeypatch.setattr(OwnParts, "whole", lambda self: pytest.fail("the whole is made"))
    for schedule, rank in ((plan.schedule, 0), (told, 41)):
        program = lower(schedule, rank, "forward", size, NCCL)
        assert program == lower(whole, rank, "forward", size, NCCL)
    connected = _Connecting(whole)
    connect(cast(Transport, connected), told, "forward", torch.device("cpu"))
    own = {each for each in links(whole, BOTH[:1]) if 41 in each[:2]}
    assert own <= connected.prepared <= links(whole, BOTH[:1])
    assert len(connected.prepared - own) <= 2 * 64  # of each other rank one in a channel


NCCL = transport_target("nccl")


class _Connecting:
    """The transport of one rank of many, whose other ranks say what they would."""

    rank, target = 41, NCCL

    def __init__(self, whole: ScheduleData) -> None:
        self.whole, self.prepared = whole, set[Link]()

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Return what all ranks say, by rank."""
        said = [message_groups.first_sends(links(self.whole, BOTH[:1]), rank) for rank in range(64)]
        assert said[self.rank] == payload
        return said

    def prepare(self, needed: set[Link], device: torch.device) -> None:
        """Keep what would be connected."""
        self.prepared = set(needed)


# ---------- chunks that pieces do not divide


def odd(ranks: int, **changes: Any) -> CallToPlan:
    """Chunks of 33 tokens: nothing that moves in two pieces fits."""
    size = Workload(1, 66 * ranks, 66 * ranks, 8, 8, 64)
    return call(setting(clusters(ranks // 4), size), tr.Causal(), **changes)


@pytest.mark.parametrize("ranks", [20, 64])
def test_pieces_that_do_not_divide_are_left(ranks: int) -> None:
    alone = figures("bidirectional", Task(odd(ranks).setting), 2, float("inf"))
    other = figures("ring", Task(odd(ranks).setting), 2, float("inf"))
    assert alone is not None and other is not None and alone.seconds < other.seconds, "it would win"
    plan = plan_call(odd(ranks, families=("bidirectional", "bidirectional/pieces4", "ring")))
    assert plan.name.partition("/")[0] == "ring"
    lost = next(each for each in plan.candidates if each.name == "bidirectional")
    assert "2 pieces do not divide chunks of 33 tokens" in lost.reason


# ---------- masks


@pytest.mark.slow
def test_a_window_of_many_ranks_is_pruned() -> None:
    """20 ranks in hosts of 4, a window of one chunk: a ring sends to one neighbour, but without a mask to all."""
    size = workload(20, (20, 20), 64)
    asked = call(setting(clusters(5), size), tr.SlidingWindow(64), "contiguous", families=("ulysses", "usp/4", "ring"))
    plan = plan_call(asked)
    ring = predict(named("ring", 20, size.q_length, tr.SlidingWindow(64)), asked.setting)
    assert {"ring", "ulysses", "usp/4"} <= {each.name for each in plan.candidates}
    assert (plan.candidates[0].predicted_seconds or 0) <= ring.seconds
    dense = plan_call(replace(asked, mask=tr.Full()))
    assert "ring" not in {each.name for each in dense.candidates}, "what one host shows would have done"


def test_above_that_the_reason_says_what_is_not_reckoned() -> None:
    for mask, layout, says in (
        (tr.SlidingWindow(64), "contiguous", "though some blocks (layout contiguous) see nothing of others"),
        (tr.Causal(), "contiguous", "though one rank's queries see 2 × the average and some blocks"),
    ):
        found = forecast_call(large_call(mask=mask, layout=layout, families=("ring",)))
        assert says in found.reason


@pytest.mark.parametrize(
    ("mask", "layout", "wanted"),
    [
        (tr.Full(), "contiguous", True),
        (tr.Causal(), "zigzag", True),
        (tr.Causal(), "striped", True),
        (tr.Causal(), "zigzag/2", True),
        (tr.Causal(), "contiguous", False),
        (tr.SlidingWindow(64), "contiguous", False),
        (tr.SlidingWindow(64), "zigzag", False),
        (tr.SlidingWindow(2048), "striped", True),
        (tr.Documents([0, 4096, 8192]), "contiguous", False),
        (tr.Documents([0, 4096, 8192]), "striped", True),
        (tr.Documents([0, 0]), "contiguous", True),  # of nothing, all ranks have the same
    ],
    ids=str,
)
def test_which_masks_leave_ranks_equally_much(mask: tr.Mask, layout: str, wanted: bool) -> None:
    whole = make_layout(layout, 32, 8192)
    assert is_even(mask, whole, whole) == wanted


def test_how_much_the_last_rank_sees() -> None:
    assert most_of_own_rows(tr.Causal(), make_layout("contiguous", 32, 8192), 8192) == pytest.approx(63 / 32, rel=0.01)
    assert most_of_own_rows(tr.Causal(), make_layout("zigzag", 32, 8192), 8192) == pytest.approx(1.0)


def test_nothing_visible_takes_no_time() -> None:
    found = forecast_call(large_call(mask=tr.Documents([0, 0]), families=("ring",)))
    assert found.candidates[0].compute_seconds == pytest.approx(0.0, abs=1e-9)


# ---------- both passes


def test_passes_follow_one_another() -> None:
    size = workload(64, (8, 8), 64)
    one, other, both = (
        figures("ring", Task(setting(clusters(16), size, passes, tflops=1.0)), 2, float("inf"))
        for passes in (BOTH[:1], BOTH[1:], BOTH)
    )
    assert one is not None and other is not None and both is not None
    assert both.seconds == pytest.approx(one.seconds + other.seconds)
    assert both.peak_bytes == max(one.peak_bytes, other.peak_bytes)
