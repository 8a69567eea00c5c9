"""A memory limit that nothing keeps to is refused by what schedules need, which takes no simulation to know."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import StringIO
from typing import Any

import pytest
import torch

from tokenring.cli.main import main
from tokenring.errors import MemoryLimitError
from tokenring.lowering.footprint import HeldBytes
from tokenring.planner.choosing import auto, folded_world, select
from tokenring.planner.choosing.auto import CallToPlan, make, plan_or_forecast
from tokenring.planner.choosing.memory_limits import least_bytes, needs, smallest
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.machines.machine import machine_of_preset
from tokenring.planner.machines.presets import preset
from tokenring.planner.simulation import predict
from tokenring.planner.simulation.predict import Setting
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import late_of
from tokenring.sequence.layout import zigzag
from tokenring.sequence.mask import Causal, Full, Mask, SlidingWindow
from tokenring.sequence.workload import Workload

FEW = ("ring", "direct-q", "ulysses")
NAMES = ("ring", "tokenring", "bidirectional", "direct-kv", "direct-q", "ulysses", "usp/2", "tiles/2x4")


def call(
    name: str,
    limit: int | None,
    mask: Mask | None = None,
    tokens: int = 4096,
    everything: bool = False,
    families: tuple[str, ...] = (),
) -> CallToPlan:
    net = interconnect_of(preset(f"preset:{name}"))
    machine = machine_of_preset(f"preset:{name}", torch.bfloat16)
    size = Workload(1, tokens, tokens, 8, 8, 64, torch.bfloat16)
    setting = Setting(size, net, machine, ("forward", "backward"))
    layout = zigzag(net.world_size, tokens)
    return CallToPlan(setting, layout, layout, mask or Causal(), families, limit, everything)


@cache
def need(name: str, mask: Mask) -> HeldBytes:
    """Return what a schedule needs on an hgx-h100."""
    given = call("hgx-h100", None, mask)
    return needs(make(given, name), given.setting)


def no_simulation(*given: Any, **named: Any) -> Any:
    raise AssertionError("a schedule was simulated")


def watched(names: list[str]) -> Callable[..., Any]:
    """`make_in_order`, which keeps the names of what it makes."""
    true = auto.make_in_order

    def made(call: CallToPlan, name: str, *how: Any) -> Any:
        names.append(name)
        return true(call, name, *how)

    return made


@pytest.fixture
def unsimulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "simulate", no_simulation)
    monkeypatch.setattr(folded_world, "simulate", no_simulation)


@pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(512, 0)], ids=str)
def test_least_is_never_more_than_needed(mask: Mask) -> None:
    given = call("hgx-h100", None, mask)
    for name in NAMES:
        schedule = make(given, name)
        peak_bytes = need(name, mask).peak_bytes
        assert least_bytes(schedule, given.setting) <= peak_bytes
        assert peak_bytes == predict.predict(schedule, given.setting).peak_bytes


@pytest.mark.parametrize("limit", [1, 4096])
@pytest.mark.parametrize(
    ("topology", "families"), [("hgx-h100", ()), ("atlas-a3", FEW), ("hgx-h100*8", FEW)], ids=lambda each: str(each)
)
def test_refused_without_a_simulation(
    topology: str, families: tuple[str, ...], limit: int, unsimulated: None
) -> None:  # fmt: skip
    said = r"the smallest needs .*: raise the limit.*\(it is \S+; .* MB are for what"
    with pytest.raises(MemoryLimitError, match=said):
        plan_or_forecast(call(topology, limit, families=families))


def test_the_smallest_is_the_smallest(unsimulated: None) -> None:
    given = call("hgx-h100", 1)
    with pytest.raises(MemoryLimitError) as refused:
        plan_or_forecast(given)
    least = min(need(name, Causal()).peak_bytes for name in NAMES)
    said = str(refused.value).partition("the smallest needs ")[2].partition(":")[0]
    assert float(said.split()[0]) * 1e6 <= least * 1.01


def test_many_ranks_are_not_even_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(auto, "make_in_order", watched(made))
    out = StringIO()
    assert main(["plan", "--topology", "preset:hgx-h100*4", "--memory-limit", "1"], out, out, StringIO()) == 2
    assert "of what arrives from others one row of one head takes 256, and ring, to name one, needs" in out.getvalue()
    assert made == ["ring"]


def test_a_limit_that_one_keeps_to_gives_the_plan_that_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    least = min(need(name, Causal()).peak_bytes for name in NAMES)
    limited = call("hgx-h100", 2 * least, families=("ring", "tokenring", "direct-q", "direct-kv", "ulysses"))
    plan = plan_or_forecast(limited)
    monkeypatch.setattr(select, "_all_above", lambda *given: None)
    assert plan_or_forecast(limited) == plan


def test_where_whole_blocks_are_above_pieces_are_looked_at(monkeypatch: pytest.MonkeyPatch, unsimulated: None) -> None:
    """Those of the schedules that need least."""
    seen: list[str] = []

    def noted(base: Schedule, name: str) -> Schedule:
        seen.append(name)
        return late_of(base, name)

    monkeypatch.setattr(auto, "make_in_order", watched(seen))
    monkeypatch.setattr(auto, "late_of", noted)
    with pytest.raises(MemoryLimitError):
        plan_or_forecast(call("hgx-h100", 4096))
    assert {name for name in seen if name.startswith("ring/")} >= {"ring/late", "ring/pieces2", "ring/pieces4"}


def test_few_are_asked_exactly() -> None:
    asked: list[str] = []

    def exactly(name: str) -> HeldBytes:
        asked.append(name)
        return HeldBytes({"a": 40, "b": 25, "c": 90, "d": 30}[name], 0, 0)

    assert smallest([("a", 10), ("b", 20), ("c", 80), ("d", 30)], exactly) == ("b", HeldBytes(25, 0, 0))
    assert asked == ["a", "b"]
