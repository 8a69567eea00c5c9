"""The measurements of any machine: pairs alone and both ways, rounds of pairs, one rank to and from all others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from tokenring.topology.measure.colours import rounds, shuffled
from tokenring.topology.measure.lab import LEAST_LINK_SECONDS, Flow, Lab, Race, TransferOutcome, both_ways

UNDISTURBED = 0.88  # of the rate alone
REPEATS = 2
OVER_HALF = 0.6  # of what is wanted: flows that share a link have half each at most
MANY_SHARE = 0.6
AGREE = 0.08  # two values of one pair that differ by more are measured once more
ALONE_SHARE = 0.45  # of the time, for pairs alone
OVERHEAD_SECONDS = 0.012  # of a race, beside its transfers


class EstimatingLab(Lab, Protocol):
    """A lab that finds sizes itself, and whose time is bounded."""

    elapsed: float
    limit_seconds: float
    link_seconds: float

    def estimate(self) -> dict[Flow, float]:
        """Estimate the GB/s of every flow. Raises OutOfTime."""

    def learn(self, gbs: Mapping[Flow, float]) -> None:
        """Keep the GB/s that flows are known to reach alone, to choose the sizes of transfers by."""

    def latencies(self) -> dict[Flow, float]:
        """Measure the microseconds one way of each pair."""


@dataclass
class Tables:
    """The GB/s of each flow: alone; with its reverse (`both`); the least in a round of pairs, both ways (`coloured`).

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
    seen: dict[Flow, list[float]] = field(
        default_factory=dict
    )  # all values of flows that may have had their link alone
    guessed: int = 0  # flows for whose value alone there was no time

    def best(self) -> float:
        """Return the GB/s of the fastest flow alone."""
        return max(self.alone.values())

    def slowed(self, a: int, b: int, free: float) -> bool:
        """Return whether other pairs slow this one down below `free` of its rate, in some round."""
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
    found = least_disturbed(lab, tables.alone, [Race(both_ways([pair])) for pair in pairs], "pairs both ways")
    tables.both = {flow: gbs for each in found for flow, gbs in each.items()}
    _learn_more(tables, tables.both)
    add_series(lab, tables, 0)
    _learn_more(tables, tables.coloured)
    lab.learn(tables.alone)
    everyone = range(lab.ranks)
    share = 1.0 if lab.ranks < 5 else MANY_SHARE
    outs = [Race(tuple((r, other) for other in everyone if other != r), True, share) for r in everyone]
    tables.out = {r: each.total for r, each in enumerate(_alike(lab, outs, "one to all"))}
    intos = [Race(tuple((other, r) for other in everyone if other != r), True, share) for r in everyone]
    tables.into = {r: each.total for r, each in enumerate(_alike(lab, intos, "all to one"))}


def add_series(lab: Lab, tables: Tables, series: int) -> None:
    """Run rounds of pairs in one more order: the least of each flow counts."""
    races = [Race(both_ways(each)) for each in shuffled(lab.ranks, series)]
    undisturbed = {flow: min(gbs, tables.both[flow]) for flow, gbs in tables.alone.items()}
    for found in least_disturbed(lab, undisturbed, races, "rounds of pairs", sure=1):
        for flow, gbs in found.items():
            tables.coloured[flow] = min(gbs, tables.coloured.get(flow, gbs))


def totals(lab: Lab, races: Sequence[Race], what: str) -> list[TransferOutcome]:
    """Run races for the total twice, and again where the two runs differ; return the least disturbed outcomes."""
    best = lab.race(races, what)
    differ = list(range(len(races)))
    for _ in range(REPEATS):
        if not differ or lab.hurried:
            break
        for at, outcome in zip(list(differ), lab.race([races[at] for at in differ], what), strict=True):
            if not _differ((best[at].total, outcome.total)):
                differ.remove(at)
            best[at] = best[at].least(outcome)
    return best


def _alike(lab: Lab, races: Sequence[Race], what: str) -> list[TransferOutcome]:
    """Run races for the total of which most should reach an equal rate: those that do not are run again."""
    best = lab.race(races, what)
    for _ in range(REPEATS):
        usual = statistics.median(each.total for each in best)
        again = [at for at, each in enumerate(best) if _differ((each.total, usual))]
        if not again or lab.hurried:
            break
        for at, outcome in zip(again, lab.race([races[at] for at in again], what), strict=True):
            best[at] = best[at].least(outcome)
    return best


def least_disturbed(
    lab: Lab, wanted: Mapping[Flow, float], races: Sequence[Race], what: str, sure: int = 0
) -> list[dict[Flow, float]]:
    """Return for each race the GB/s of its flows, from the run whose slowest flow was fastest.

    A race is run again if a flow in it is slower than wanted: what slows it down must do so each time. The best
    value of each flow is not what counts: one that stalls leaves its share to others.

    sure: how often a race is run again even if a flow in it has less than OVER_HALF of what is wanted.
    """
    seen = [dict(outcome.gbs) for outcome in lab.race(races, what)]
    for turn in range(REPEATS):
        least = 0.0 if turn < sure else OVER_HALF
        again = [
            at
            for at, found in enumerate(seen)
            if any(least * wanted[flow] <= gbs < UNDISTURBED * wanted[flow] for flow, gbs in found.items())
        ]
        if not again or lab.hurried:
            break
        for at, outcome in zip(again, lab.race([races[at] for at in again], what), strict=True):
            runs = (seen[at], dict(outcome.gbs))
            seen[at] = max(runs, key=lambda found: min(gbs / wanted[flow] for flow, gbs in found.items()))
    return seen


def _fit_time(lab: EstimatingLab) -> None:
    """Make transfers shorter where the usual ones would not fit."""
    races = 2 * lab.ranks * (lab.ranks - 1)  # each direction alone, twice
    room = ALONE_SHARE * lab.limit_seconds / max(races, 1) - OVERHEAD_SECONDS
    lab.link_seconds = max(LEAST_LINK_SECONDS, min(lab.link_seconds, room * 3 / 4))


def _alone(lab: EstimatingLab, tables: Tables, estimates: Mapping[Flow, float]) -> None:
    """Measure each direction of each pair twice, in two passes; again where the two differ."""
    flows = [flow for each in rounds(lab.ranks) for flow in both_ways(each)]
    values: dict[Flow, list[float]] = {flow: [] for flow in flows}
    for turn in range(2):
        for batch in _batches(flows, lab.ranks):
            if lab.elapsed > ALONE_SHARE * lab.limit_seconds and (turn or values[flows[0]]):
                break
            _measure(lab, batch, values)
        lab.learn({flow: seen[-1] for flow, seen in values.items() if seen})
    for _ in range(REPEATS):
        _measure(lab, [flow for flow in flows if _differ(values[flow])], values)
    tables.seen = values
    for flow, seen in values.items():
        tables.alone[flow] = statistics.mean(_agreeing(seen)) if seen else estimates[flow]
        tables.spread[flow] = (max(seen) - min(seen)) / tables.alone[flow] if seen else 0.0
    tables.guessed = sum(not seen for seen in values.values())


def _learn_more(tables: Tables, gbs: Mapping[Flow, float]) -> None:
    """Raise rates alone to what flows reached beside others: both values alone may have been disturbed."""
    for flow, value in gbs.items():
        tables.seen[flow].append(value)
        tables.alone[flow] = max(tables.alone[flow], statistics.mean(_agreeing(tables.seen[flow])))


def _measure(lab: Lab, flows: Sequence[Flow], values: dict[Flow, list[float]]) -> None:
    if flows:
        for flow, outcome in zip(flows, lab.race([Race((flow,)) for flow in flows], "pairs alone"), strict=True):
            values[flow].append(outcome.gbs[flow])


def _differ(seen: Sequence[float]) -> bool:
    """Return whether there are several values and no two of them agree."""
    return len(seen) > 1 and len(_agreeing(seen)) == 1


def _agreeing(seen: Sequence[float]) -> list[float]:
    """Return the best values that agree, else the one in the middle.

    What disturbs takes time, and hardly ever gives any.
    """
    ordered = sorted(seen, reverse=True)
    for high, low in pairwise(ordered):
        if low * (1 + AGREE) >= high:
            return [value for value in ordered if low <= value <= high]
    return [statistics.median_low(ordered)]


def _batches(flows: Sequence[Flow], ranks: int) -> list[Sequence[Flow]]:
    """Cut the flows into batches of as many as one round has: between batches all ranks see the time."""
    return [flows[start : start + ranks] for start in range(0, len(flows), ranks)]
