"""What is measured of any machine: pairs alone and both ways, rounds of pairs, one rank to and from all others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenring.topology.measure.colours import rounds, shuffled
from tokenring.topology.measure.lab import LEAST_LINK_SECONDS, Flow, Lab, Race, both_ways

AGREE = 0.1  # two values of one pair that differ by more are measured once more
ALONE_SHARE = 0.45  # of the time, for pairs alone
OVERHEAD_SECONDS = 0.012  # of a race, beside its transfers


class EstimatingLab(Lab, Protocol):
    """A lab that finds sizes itself, and whose time is bounded."""

    elapsed: float
    limit_seconds: float
    link_seconds: float

    def estimate(self) -> dict[Flow, float]: ...

    def learn(self, gbs: Mapping[Flow, float]) -> None: ...

    def latencies(self) -> dict[Flow, float]: ...


@dataclass
class Tables:
    """GB/s of each flow: alone; with its reverse (`both`); the least in a round of pairs, both ways (`coloured`).

    out, into: of each rank, to and from all others at once, in all. spread: of the values of `alone`, as a share.
    """

    ranks: int
    alone: dict[Flow, float] = field(default_factory=dict)
    spread: dict[Flow, float] = field(default_factory=dict)
    both: dict[Flow, float] = field(default_factory=dict)
    coloured: dict[Flow, float] = field(default_factory=dict)
    out: dict[int, float] = field(default_factory=dict)
    into: dict[int, float] = field(default_factory=dict)
    latency_us: dict[Flow, float] = field(default_factory=dict)
    guessed: int = 0  # flows for whose value alone there was no time

    def best(self) -> float:
        return max(self.alone.values())

    def slowed(self, a: int, b: int, free: float) -> bool:
        """Whether other pairs slow this one down, in some round."""
        flows = ((a, b), (b, a))
        return any(self.coloured[flow] < free * min(self.alone[flow], self.both[flow]) for flow in flows)


def survey(lab: EstimatingLab, tables: Tables) -> None:
    """Fill all tables. Raises OutOfTime."""
    tables.latency_us = lab.latencies()
    estimates = lab.estimate()
    _fit_time(lab)
    _alone(lab, tables, estimates)
    lab.learn(tables.alone)
    pairs = [pair for each in rounds(lab.ranks) for pair in each]
    outcomes = lab.race([Race(both_ways([pair])) for pair in pairs], "pairs both ways")
    tables.both = {flow: gbs for outcome in outcomes for flow, gbs in outcome.gbs.items()}
    add_series(lab, tables, 0)
    everyone = range(lab.ranks)
    outs = [Race(tuple((r, other) for other in everyone if other != r), total=True) for r in everyone]
    tables.out = {r: each.total for r, each in enumerate(lab.race(outs, "one to all"))}
    intos = [Race(tuple((other, r) for other in everyone if other != r), total=True) for r in everyone]
    tables.into = {r: each.total for r, each in enumerate(lab.race(intos, "all to one"))}


def add_series(lab: Lab, tables: Tables, series: int) -> None:
    """Rounds of pairs, in one more order: the least of each flow counts."""
    races = [Race(both_ways(each)) for each in shuffled(lab.ranks, series)]
    for outcome in lab.race(races, "rounds of pairs"):
        for flow, gbs in outcome.gbs.items():
            tables.coloured[flow] = min(gbs, tables.coloured.get(flow, gbs))


def _fit_time(lab: EstimatingLab) -> None:
    """Shorter transfers where the usual ones would not fit."""
    races = 2 * lab.ranks * (lab.ranks - 1)  # each direction alone, twice
    room = ALONE_SHARE * lab.limit_seconds / max(races, 1) - OVERHEAD_SECONDS
    lab.link_seconds = max(LEAST_LINK_SECONDS, min(lab.link_seconds, room * 3 / 4))


def _alone(lab: EstimatingLab, tables: Tables, estimates: Mapping[Flow, float]) -> None:
    """Each direction of each pair twice, in two passes; once more where the two differ."""
    flows = [flow for each in rounds(lab.ranks) for flow in both_ways(each)]
    values: dict[Flow, list[float]] = {flow: [] for flow in flows}
    for turn in range(2):
        for batch in _batches(flows, lab.ranks):
            if lab.elapsed > ALONE_SHARE * lab.limit_seconds and (turn or values[flows[0]]):
                break
            _measure(lab, batch, values)
        lab.learn({flow: seen[-1] for flow, seen in values.items() if seen})
    _measure(lab, [flow for flow in flows if _differ(values[flow])], values)
    for flow, seen in values.items():
        tables.alone[flow] = statistics.median(seen) if seen else estimates[flow]
        tables.spread[flow] = (max(seen) - min(seen)) / tables.alone[flow] if seen else 0.0
    tables.guessed = sum(not seen for seen in values.values())


def _measure(lab: Lab, flows: Sequence[Flow], values: dict[Flow, list[float]]) -> None:
    if flows:
        for flow, outcome in zip(flows, lab.race([Race((flow,)) for flow in flows], "pairs alone"), strict=True):
            values[flow].append(outcome.gbs[flow])


def _differ(seen: Sequence[float]) -> bool:
    return len(seen) > 1 and max(seen) - min(seen) > AGREE * max(seen)


def _batches(flows: Sequence[Flow], ranks: int) -> list[Sequence[Flow]]:
    """As many as one round has: between batches all ranks see the time."""
    return [flows[start : start + ranks] for start in range(0, len(flows), ranks)]
