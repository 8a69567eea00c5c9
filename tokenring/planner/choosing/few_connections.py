"""Plans kept to the connections that a transport advises: by a mode of it, or by another schedule, where that is cheap.

Many connections take gigabytes and a minute to make, which no prediction counts. So where the chosen schedule makes
more than are advised, the best schedules are looked at over each mode with fewer, as a part of planning that may take
no time to speak of: only schedules that are nearly as fast as they are, over modes in whose queues their bytes leave
them so; few are simulated, out of the programs that were lowered before; the first that stays nearly as fast is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from tokenring.display.units import mb_text, time_text
from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import ScheduleData
from tokenring.lowering.footprint import channel_bytes, most_connected
from tokenring.lowering.target import Target
from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.choosing.judged import Judged, Judgement
from tokenring.planner.choosing.memory_fallback import over
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.planner.choosing.scale_out import FEW_HOSTS, Task, figures, needed
from tokenring.planner.choosing.select import ROUNDING
from tokenring.planner.simulation.predict import Setting, predict_over

P = TypeVar("P", Plan, Forecast)
MOST_FOR_FEW = 1.25  # how many times longer a call may take to keep to advised connections
MOST_TRIED = 2  # simulations, each a few percent of the time that planning takes
IN_MORE = "in more communicators: "  # before what is said of candidates over the transport as it is


class Few(NamedTuple):
    """A schedule that keeps to the advice: what it costs over a mode; None: over the transport as it is."""

    candidate: Candidate
    mode: str | None


class OverModes(Protocol):
    """The schedules of a plan, as they can be looked at over other modes."""

    def least(self, name: str, setting: Setting) -> tuple[int, float]:
        """Return the connections of the rank that has most, and the least seconds: for next to nothing."""

    def predicted(self, candidate: Candidate, setting: Setting, most_seconds: float) -> Candidate | None:
        """Return a candidate over another mode, simulated; None where it takes longer."""


def few(
    candidates: Sequence[Candidate], setting: Setting, limit_bytes: int | None, modes: Mapping[str, Target],
    known: OverModes,
) -> Few | None:  # fmt: skip
    """Return what keeps to the advice at little cost; None where the plan does so itself, or nothing does.

    candidates: those of the plan, the chosen one first. modes: by name, those with most connections first.
    """
    best, most = candidates[0], setting.target.advised_connections
    if most is None or not modes or best.predicted_seconds is None or (best.connections or 0) <= most:
        return None
    most_seconds = best.predicted_seconds * MOST_FOR_FEW * ROUNDING
    near = [each for each in candidates if (each.predicted_seconds or most_seconds) < most_seconds]
    near = [each for each in near if limit_bytes is None or (each.peak_bytes or 0) <= limit_bytes]
    as_it_is = [each for each in near if (each.connections or 0) <= most and not _takes_more(each, best)]
    least = min(as_it_is, key=_seconds, default=None)
    if least is not None:
        most_seconds = _seconds(least)
    ways = _ways(near, most_seconds, best, setting, modes, known)
    for each, mode, asked in islice(ways, MOST_TRIED):
        found = known.predicted(each, asked, most_seconds)
        if found is not None and (limit_bytes is None or (found.peak_bytes or 0) <= limit_bytes):
            return Few(found, mode)
    return None if least is None else Few(least, None)


def _ways(
    near: Sequence[Candidate], most_seconds: float, best: Candidate, setting: Setting, modes: Mapping[str, Target],
    known: OverModes,
) -> Iterator[tuple[Candidate, str, Setting]]:  # fmt: skip
    """Yield schedules over modes that keep to the advice, take no more memory, and may be fast enough.

    Over one mode of pairs alone: those after it have fewer queues of the same kind, and are hardly ever faster.
    """
    most, total = setting.target.advised_connections or 0, best.connection_bytes or 0
    for each in near:
        if _seconds(each) >= most_seconds or (each.connections or 0) <= most:
            continue
        kinds = set[bool]()
        for mode, target in modes.items():
            if target.batching in kinds:
                continue
            asked = over(setting, target)
            count, least_seconds = known.least(each.name, asked)
            if count <= most and count * target.connection_bytes <= total:
                kinds.add(target.batching)
                if least_seconds < most_seconds:
                    yield each, mode, asked


def _seconds(each: Candidate) -> float:
    return float("inf") if each.predicted_seconds is None else each.predicted_seconds


def _takes_more(each: Candidate, best: Candidate) -> bool:
    return (each.connection_bytes or 0) > (best.connection_bytes or 0)


def plan_in_few(
    plan: Plan, judged: Judgement, setting: Setting, limit_bytes: int | None, modes: Mapping[str, Target]
) -> Plan:
    """Return the plan, or another of these schedules, kept to the advice where that costs little."""
    known = OverModesByRank(judged.judged)
    found = few(plan.candidates, setting, limit_bytes, modes, known)
    if found is None:
        return plan
    return replace(_reworded(plan, found, setting), schedule=known.judged[found.candidate.name].schedule)


def forecast_in_few(
    forecast: Forecast, task: Task, limit_bytes: int | None, modes: Mapping[str, Target]
) -> Forecast:  # fmt: skip
    """Return the forecast, or that of another schedule, kept to the advice where that costs little."""
    found = few(forecast.candidates, task.setting, limit_bytes, modes, OverModesByHost(task))
    return forecast if found is None else replace(_reworded(forecast, found, task.setting), name=found.candidate.name)


def _reworded(plan: P, found: Few, setting: Setting) -> P:
    """Return the plan with what keeps to the advice as its first candidate, and why. The schedule is the caller's."""
    best, one, target = plan.candidates[0], found.candidate, setting.target
    where = "" if found.mode is None else f"over transport {found.mode!r} "
    reason = (
        f"{one.name}: {time_text(_seconds(one))} predicted for {' + '.join(setting.passes)} on "
        f"{setting.interconnect.name}, {where}with {_made(one)}; else {best.name} takes {time_text(_seconds(best))}, "
        f"with {_made(best)} ({target.why_few_connections})"
    )
    fewest = f"the best that keeps to {target.advised_connections} communicators, of those that were looked at"
    rest: list[Candidate] = []
    for each in plan.candidates:
        if each.name != one.name:
            rest.append(each if each.predicted_seconds is None else replace(each, reason=IN_MORE + each.reason))
    return replace(
        plan, transport=found.mode, reason="; ".join([reason, *setting.interconnect.notes]),
        candidates=(replace(one, reason=fewest), *rest),
    )  # fmt: skip


def _made(each: Candidate) -> str:
    return f"{each.connections} communicators ({mb_text(each.connection_bytes or 0)})"


# ---------- schedules that were simulated rank by rank


class OverModesByRank:
    """Schedules that were judged: those whose programs were kept can be simulated again."""

    def __init__(self, judged: Sequence[Judged]) -> None:
        self.judged = {each.name: each for each in judged}

    def least(self, name: str, setting: Setting) -> tuple[int, float]:
        """See OverModes."""
        schedule = self.judged[name].schedule
        return most_connected(schedule, setting.target, setting.passes), queue_seconds(schedule, setting)

    def predicted(self, candidate: Candidate, setting: Setting, most_seconds: float) -> Candidate | None:
        """See OverModes."""
        judged = self.judged[candidate.name]
        before = judged.prediction
        found = predict_over(before, judged.schedule, setting, most_seconds) if before and before.kept else None
        if found is None:
            return None
        return replace(
            candidate, predicted_seconds=found.seconds, exposed_seconds=found.exposed_seconds,
            peak_bytes=found.peak_bytes, connections=found.connections, connection_bytes=found.connection_bytes,
        )  # fmt: skip


def queue_seconds(schedule: ScheduleData, setting: Setting) -> float:
    """Return the least seconds in which the transport's queues let all bytes pass, each message alone on its way.

    A queue is that of a source, of both directions of a pair, or of one; in each channel, or of both.
    """
    messages, net = setting.machine.messages, setting.interconnect
    total = 0.0
    for direction in setting.passes:
        queues: dict[object, float] = defaultdict(float)
        for (src, dst, channel), nbytes in channel_bytes(schedule, setting.workload, direction).items():
            gbs = min((net.gbs(wire) for wire in net.way(src, dst)), default=messages.flow_gbs)
            pair = (min(src, dst), max(src, dst)) if messages.pair_serial else (src, dst)
            queue = src if messages.source_serial else pair, channel if messages.channels > 1 else ""
            queues[queue] += nbytes / min(gbs, messages.flow_gbs) / 1e9
        total += max(queues.values(), default=0.0)
    return total


# ---------- schedules of which one host stands for all


class OverModesByHost:
    """Schedules that were folded, over each mode anew."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._over: dict[Target, Task] = {}

    def least(self, name: str, setting: Setting) -> tuple[int, float]:
        """See OverModes."""
        try:
            return needed(name, self._task(setting)).connections, 0.0
        except ConfigurationError:  # it folds over no mode
            return 0, float("inf")

    def predicted(self, candidate: Candidate, setting: Setting, most_seconds: float) -> Candidate | None:
        """See OverModes."""
        found = figures(candidate.name, self._task(setting), FEW_HOSTS, most_seconds)
        if found is None or found.seconds > most_seconds:
            return None
        need = found.needs
        return replace(
            candidate, predicted_seconds=found.seconds, exposed_seconds=found.exposed_seconds,
            peak_bytes=need.peak_bytes, connections=need.connections, connection_bytes=need.connection_bytes,
        )  # fmt: skip

    def _task(self, setting: Setting) -> Task:
        if setting.target not in self._over:
            self._over[setting.target] = replace(self.task, setting=setting)
        return self._over[setting.target]
