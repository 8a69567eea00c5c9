"""What programs take at least that wait for each other: never more than the simulation says, and mutants are caught."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import BOTH, clusters, setting, workload
from test_planner_simulate import drawn

from tokenring.errors import ScheduleError
from tokenring.planner.choosing import folded_world
from tokenring.planner.choosing.folded_world import FoldedWorld
from tokenring.planner.simulation import chained, predict
from tokenring.planner.simulation.chained import chained_seconds
from tokenring.planner.simulation.operations import Operation
from tokenring.planner.simulation.simulate import simulate
from tokenring.tables.rates import Messages

SEEDS = range(60)
FOLDED = ("ring", "tokenring", "direct-kv", "ulysses", "usp/4", "double-ring/4", "relay/4", "reduced/4", "mesh-kv/3x4")
ROUNDING = 1 + 1e-9
MORE_MESSAGES = (
    Messages(1e-6, 1e-7, source_serial=True), Messages(2e-6, 1e-6, pipelined=True), Messages(1e-6, channels=1),
    Messages(1e-6, handling_seconds=1e-6, handling_gbs=2.0),
)  # fmt: skip


class Watched:
    """Simulations as they are asked for, each with the bounds of all its programs and of every one alone."""

    def __init__(self) -> None:
        self.bounds: list[tuple[float, float, float]] = []  # alone, all, simulated

    def simulate(
        self, net: Any, programs: Sequence[Sequence[Operation]], messages: Messages, *some: Any, **more: Any
    ) -> Any:
        """Simulate, and note the bounds beside what was found."""
        found = simulate(net, programs, messages, *some, **more)
        given = {name: more[name] for name in ("canonical", "start_seconds") if name in more}
        every = dict(enumerate(programs))
        alone = [chained_seconds({rank: every[rank]}, net, messages, whole=False, **given) for rank in every]
        self.bounds.append((max(alone), chained_seconds(every, net, messages, **given), found.seconds))
        return found

    @property
    def broken(self) -> int:
        """Number of simulations that took less than a bound."""
        return sum(max(alone, whole) > seconds * ROUNDING for alone, whole, seconds in self.bounds)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    monkeypatch.setattr(predict, "simulate", found.simulate)
    monkeypatch.setattr(folded_world, "simulate", found.simulate)
    return found


def all_simulated(seeds: Sequence[int]) -> None:
    """Simulate drawn schedules of four ranks, to the end, every other with more kinds of messages."""
    for seed in seeds:
        schedule, asked = drawn(seed)
        if seed % 2:
            messages = random.Random(seed).choice(MORE_MESSAGES)
            asked = replace(asked, machine=replace(asked.machine, messages=messages, start_seconds=1e-6))
        with suppress(ScheduleError):  # of programs that the transport's order would stop
            predict.predict(schedule, asked)


def all_folded() -> None:
    """Simulate families folded on one host of three, to the end."""
    for name in FOLDED:
        asked = setting(clusters(3, 4), workload(12, (12, 12), 768), BOTH, tflops=0.5)
        world = FoldedWorld(name, asked, 1.0, 3, 4)
        for direction in BOTH:
            assert world.least_seconds(direction) <= world.one_pass(direction).seconds * ROUNDING


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**9))
def test_no_simulation_takes_less(seed: int) -> None:
    """Every family, topology, mask and kind of messages, of all programs and of one alone."""
    found = Watched()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "simulate", found.simulate)
        all_simulated([seed])
    assert not found.broken, found.bounds


def test_it_is_near(watched: Watched) -> None:
    """A bound of nothing would hold, too: of most schedules it is most of the time."""
    all_simulated(SEEDS)
    near = [whole / seconds for _, whole, seconds in watched.bounds if whole]
    assert len(near) > len(SEEDS)
    assert sorted(near)[len(near) // 2] > 0.8


def test_one_of_many_hosts(watched: Watched) -> None:
    all_folded()
    assert len(watched.bounds) == len(FOLDED) * len(BOTH)
    assert not watched.broken




def one_after_another(was: Any) -> Any:
    """A message passes its wires one after another."""

    def way(self: Any, src: int, dst: int) -> Any:
        wires, seconds = was(self, src, dst)
        return wires, max(seconds, sum(each for _, each in wires))

    return way


def in_given_order(was: Any) -> Any:
    """Messages pass in the order in which they are waited for."""

    def add(self: Any, begin: float, seconds: float) -> float:
        self.end = max(self.end, begin) + seconds
        return float(self.end)

    return add


def twice_the_latency(was: Any) -> Any:
    """The latency passes twice."""

    def set_out(self: Any, message: Any, pair: Any, now: float) -> None:
        was(self, message, pair, now + self.messages.latency_seconds)

    return set_out


MUTANTS = [
    ("_Chain", "_way", one_after_another), ("_Turns", "add", in_given_order), ("_Chain", "_set_out", twice_the_latency),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "method", "mutant"), MUTANTS, ids=[each.__name__ for _, _, each in MUTANTS])
def test_wrong_bounds_are_found(
    owner: str, method: str, mutant: Any, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = getattr(chained, owner)
    monkeypatch.setattr(changed, method, mutant(getattr(changed, method)))
    for seed in SEEDS:
        all_simulated([seed])
        if watched.broken:
            return
    pytest.fail("no simulation takes less than these bounds")


def test_a_message_counts_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one of many hosts, the message that goes out stands for the one that comes in."""
    monkeypatch.setattr(chained._Message, "counted", property(lambda self: -1, lambda self, rank: None))
    with pytest.raises(AssertionError):
        all_folded()
