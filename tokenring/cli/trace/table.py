"""A traced call summed up by step: what the slowest rank and what ranks on average spent where."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from tokenring.cli.bench.table import case_text, count, machine_text, ms
from tokenring.cli.trace.record import Bar, Simulated, Stretch, Traced
from tokenring.display.console import Ink
from tokenring.ir.schedule_data import PASSES, Pass

FORMAT, VERSION = "tokenring-trace", 1
NAMES = 10  # columns of the names of rows: two more than the longest, so that narrow terminals get them by themselves
COLUMNS = {"compute": "compute", "post": "moves", "pack": "moves", "wait": "waits", "merge": "merges"}
PARTS = ("compute", "moves", "waits", "merges", "other")
LEGEND = (
    "compute: kernel calls. moves: packing, posting sends and receives. waits: exposed communication. merges: writing, "
    "merging and clearing results. other: between instructions. A step lasts from the end of the step before to the "
    "end of its own last instruction; ends: before the first and after the last one. slowest: the rank whose step took "
    "longest; in the sums, whose call did. own: all but compute and waits, the executor's own time, in µs."
)


@dataclass(frozen=True)
class Spent:
    """The time that a rank spent in one step of a pass; step None: before the first instruction, and after the last."""

    rank: int
    direction: Pass
    step: int | None
    seconds: Mapping[str, float]  # of each of PARTS

    @property
    def total(self) -> float:
        """The time of all parts."""
        return sum(self.seconds.values())

    @property
    def own(self) -> float:
        """The executor's own time."""
        return self.total - self.seconds["compute"] - self.seconds["waits"]


@dataclass(frozen=True)
class TracedSpan:
    """One step of a pass at one rank."""

    rank: int
    direction: Pass
    step: int
    began: float
    ended: float
    bars: Sequence[Bar]


def spans(stretches: Iterable[Stretch], all_bars: Sequence[Bar]) -> list[TracedSpan]:
    """Return the steps, each from the end of the one before."""
    found = []
    for stretch in stretches:
        bars = [each for each in all_bars if (each.rank, each.direction) == (stretch.rank, stretch.direction)]
        at = bars[0].began if bars else stretch.ended
        for step, group in groupby(bars, key=lambda bar: bar.step):
            inside = list(group)
            found.append(TracedSpan(stretch.rank, stretch.direction, step, at, inside[-1].ended, inside))
            at = inside[-1].ended
    return found


def spent(traced: Traced) -> list[Spent]:
    """Return all that every rank spent; the entries of one rank and pass add up to its stretch."""
    steps = [Spent(each.rank, each.direction, each.step, _parts(each)) for each in spans(traced.stretches, traced.bars)]
    for stretch in traced.stretches:
        inside = sum(each.total for each in steps if (each.rank, each.direction) == (stretch.rank, stretch.direction))
        outside = dict.fromkeys(PARTS, 0.0) | {"other": stretch.ended - stretch.began - inside}
        steps.append(Spent(stretch.rank, stretch.direction, None, outside))
    return steps


def _parts(span: TracedSpan) -> dict[str, float]:
    seconds = dict.fromkeys(PARTS, 0.0)
    for bar in span.bars:
        seconds[COLUMNS[bar.kind]] += bar.seconds
    seconds["other"] = span.ended - span.began - sum(seconds.values())
    return seconds


# ---------- as text


def table(traced: Traced, ink: Ink) -> str:
    """Return the whole report as text."""
    everything = spent(traced)
    lines = [*_heading(traced, ink)]
    for direction in PASSES:
        if of_pass := [each for each in everything if each.direction == direction]:
            lines += ["", *_Grid(direction, of_pass, traced, ink).lines()]
    if traced.case.backward:
        lines += _Grid("both", everything, traced, ink).sums()  # below the last pass, in its columns
    notes = [LEGEND]
    if traced.machine.hosts == 1 and traced.ranks > traced.machine.cores:
        notes.append(
            f"{count(traced.ranks, 'rank')} share {count(traced.machine.cores, 'core')}: "
            f"every part includes time without a core."
        )
    lines += ["", *(ink.pale(line) for line in notes)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _heading(traced: Traced, ink: Ink) -> Iterator[str]:
    call = f"schedule {traced.schedule}, {case_text(traced.case)}, layout {traced.case.layout}"
    times = sorted(traced.rounds_s)
    rounds = f"round {traced.round + 1} of {len(times)}, the one with the median time"
    clock = "one clock for all ranks" if traced.one_clock else "clocks set by the barrier before the call"
    yield ink.bold(f"tokenring trace: {call}")
    yield ink.pale(machine_text(traced.machine))
    yield ink.pale(f"{rounds}: {ms(traced.seconds)} ms ({ms(times[0])} to {ms(times[-1])}); {clock}")
    if traced.simulated is not None:
        yield ink.pale(_expected(traced, traced.simulated))


def _expected(traced: Traced, simulated: Simulated) -> str:
    """Describe each pass as it was simulated, and what it took."""
    parts = []
    for direction in dict.fromkeys(each.direction for each in traced.stretches):
        took = max(each.ended - each.began for each in traced.stretches if each.direction == direction)
        parts.append(f"{direction} {ms(simulated.seconds(direction))} ms (measured {ms(took)})")
    return f"simulated: {', '.join(parts)}; with {simulated.source}"


class _Grid:
    """The lines of one pass, or of both: on the left the mean over all ranks, on the right the slowest rank."""

    def __init__(self, name: str, some: Sequence[Spent], traced: Traced, ink: Ink) -> None:
        self.name, self.some, self.ranks, self.ink = name, some, traced.ranks, ink
        largest = traced.seconds
        self.digits = 2 if largest < 0.99999 else 1 if largest < 9.9999 else 0

    def lines(self) -> Iterator[str]:
        heads = "".join(f"{part:>7}" for part in (*PARTS, "total"))
        mean = f"mean of {count(self.ranks, 'rank')}, ms"
        yield self.ink.bold(f"{self.name:<{NAMES}}{mean:>42}        {'slowest rank, ms':>42}{'own, µs':>18}")
        yield self.ink.pale(f"{'step':<{NAMES}}{heads}   rank {heads}{'mean':>9}{'most':>9}")
        for step in sorted({each.step for each in self.some if each.step is not None}):
            yield self._line(str(step), [each for each in self.some if each.step == step])
        yield self._line("ends", [each for each in self.some if each.step is None])
        yield from self.sums()

    def sums(self) -> Iterator[str]:
        of_ranks = [_sum([each for each in self.some if each.rank == rank]) for rank in range(self.ranks)]
        yield self.ink.bold(self._line("sum" if self.name != "both" else "both", of_ranks))
        left, right = ("".join(f"{share:>7.1%}" for share in _shares(side)) for side in self._sides(of_ranks))
        yield f"{'share':<{NAMES}}{left}        {right}"

    def _line(self, name: str, at_ranks: Sequence[Spent]) -> str:
        """Return the line of one step; ranks that have no such step count as 0 in the mean."""
        left, right = ("".join(f"{1e3 * each:>7.{self.digits}f}" for each in side) for side in self._sides(at_ranks))
        own = [each.own for each in at_ranks]
        rank = _slowest(at_ranks).rank
        return f"{name:<{NAMES}}{left}   {rank:>4} {right}{1e6 * sum(own) / self.ranks:>9,.0f}{1e6 * max(own):>9,.0f}"

    def _sides(self, at_ranks: Sequence[Spent]) -> tuple[list[float], list[float]]:
        """Return the mean over ranks and the slowest rank's seconds: each part, and the total."""
        slowest = _slowest(at_ranks)
        means = [sum(each.seconds[part] for each in at_ranks) / self.ranks for part in PARTS]
        return [*means, sum(means)], [*(slowest.seconds[part] for part in PARTS), slowest.total]


def _slowest(at_ranks: Sequence[Spent]) -> Spent:
    return max(at_ranks, key=lambda each: each.total)


def _sum(of_rank: Sequence[Spent]) -> Spent:
    seconds = {part: sum(each.seconds[part] for each in of_rank) for part in PARTS}
    return replace(of_rank[0], step=None, seconds=seconds)


def _shares(values: Sequence[float]) -> list[float]:
    return [value / values[-1] if values[-1] else 0.0 for value in values]


# ---------- as JSON


def to_json(traced: Traced) -> str:
    """Return as JSON what the table sums up, rank by rank."""
    steps = [{"rank": e.rank, "pass": e.direction, "step": e.step, "seconds": _rounded(e)} for e in spent(traced)]
    values = {
        "format": FORMAT,
        "version": VERSION,
        "schedule": traced.schedule,
        "case": traced.case.to_dict(),
        "machine": asdict(traced.machine),
        "rounds_s": traced.rounds_s,
        "round": traced.round,
        "one_clock": traced.one_clock,
        "simulated": _simulated(traced),
        "steps": steps,
    }
    lines = [f'  "{name}": {json.dumps(value)}' for name, value in values.items() if name != "steps"]
    listed = ",\n".join(f"    {json.dumps(step)}" for step in steps)
    return "{\n" + ",\n".join([*lines, f'  "steps": [\n{listed}\n  ]']) + "\n}\n"


def _simulated(traced: Traced) -> dict[str, object] | None:
    """Return the seconds of each simulated pass, and the source of its figures."""
    if (expected := traced.simulated) is None:
        return None
    directions = dict.fromkeys(each.direction for each in expected.stretches)
    return {"source": expected.source, "seconds": {each: round(expected.seconds(each), 9) for each in directions}}


def _rounded(each: Spent) -> dict[str, float]:
    parts = {part: round(seconds, 9) for part, seconds in each.seconds.items()}
    return parts | {"total": round(each.total, 9), "own": round(each.own, 9)}
