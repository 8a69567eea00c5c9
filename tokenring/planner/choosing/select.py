"""Selection of a schedule for a workload: all that fit are simulated on the interconnect, the fastest is taken."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tokenring.display.units import mb_text, time_text
from tokenring.errors import ConfigurationError, MemoryLimitError
from tokenring.lowering.footprint import HeldBytes, most_connected
from tokenring.lowering.target import Target
from tokenring.planner.bounds.bound import Bound
from tokenring.planner.choosing.candidates import MISFIT, Candidate, over_limit
from tokenring.planner.choosing.judged import NOTHING_YET, Judged, Judgement, Selection
from tokenring.planner.choosing.memory_limits import least_bytes, needs, smallest
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.simulation.predict import (
    Busiest,
    Least,
    Prediction,
    Setting,
    Worked,
    least_seconds,
    most_laden,
    predict_within,
    work_of,
)
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import NotWanted

ROUNDING = 1 + 1e-9  # two ways to the same time may differ by so much
WIRES, WORK, ALL = range(3)  # what of a schedule was counted: wires and kernels of a rank, all its work, of all ranks
SAME = 1.001  # predictions so close are equal: the simpler schedule, which comes first, is taken
BINDS = 0.5  # of the time, from which on it is what a schedule is bound by
NOTHING = 0.005  # a difference that rounds to 0%
TOO_SLOW = "its kernels alone take longer than the fastest"
TOO_MUCH = "its kernels, with copies and merges as in fewer pieces, take longer than the fastest"


def select(
    choices: Iterable[Selection],
    setting: Setting,
    bound: Bound | None = None,
    memory_limit_bytes: int | None = None,
    everything: bool = False,
) -> Plan:
    """Return the plan with the fastest of these schedules. The same for the same input, everywhere.

    memory_limit_bytes: of each rank, for buffers and what forward keeps for backward. everything: simulate also what
    cannot win, for a table. Raises ConfigurationError where nothing fits.
    """
    found = judge(choices, setting, memory_limit_bytes, everything)
    return decide(found, setting, bound, memory_limit_bytes)


def decide(found: Judgement, setting: Setting, bound: Bound | None, memory_limit_bytes: int | None) -> Plan:
    """Return the plan with the best of these schedules. Raises ConfigurationError where nothing fits."""
    judged = found.judged
    if not judged or not judged[0].fits(memory_limit_bytes):
        raise _nothing_fits(found, setting, memory_limit_bytes)
    best = judged[0]
    candidates = tuple(_candidate(each, best, bound, memory_limit_bytes) for each in judged)
    if best.seconds > (1 + NOTHING) * min(each.seconds for each in judged if each.fits(memory_limit_bytes)):
        surest = replace(candidates[0], reason="nearly the fastest, and less depends on its busiest wire")
        candidates = (surest, *candidates[1:])
    reason = _reason(judged, setting, bound, memory_limit_bytes)
    return Plan(best.schedule, setting.workload, reason, candidates + found.misfits)


def judge(
    choices: Iterable[Selection],
    setting: Setting,
    memory_limit_bytes: int | None,
    everything: bool,
    before: Judgement = NOTHING_YET,
    in_order: Sequence[str] = (),
) -> Judgement:
    """Judge these schedules and add them to those judged before. One that does just what another does is left out.

    in_order: the names of all, the simpler ones first; else those judged before come first.
    """
    choices = list(choices)
    looked_at = {choice.name: choice.looked_at for choice in choices}
    fastest = min((each.weighed_seconds for each in before.judged if each.fits(memory_limit_bytes)), default=math.inf)
    most_seconds = math.inf if everything or memory_limit_bytes is not None else fastest * SAME
    made, misfits = _made(choices, before, setting, most_seconds)
    # Of most schedules the kernels of one rank show that they cannot win.
    least = {
        name: least_seconds(schedule, setting, () if everything else (most_laden(schedule),))
        for name, schedule in made
    }
    judged = list(before.judged)
    if memory_limit_bytes is not None and not any(each.fits(memory_limit_bytes) for each in judged):
        least_of = _all_above(memory_limit_bytes, [schedule for _, schedule in made], setting)
        if least_of is not None:
            more = (Judged(*each, least[each[0]], None, need) for each, need in zip(made, least_of, strict=True))
            return Judgement((*judged, *more), before.misfits + tuple(misfits))
    fresh = [Judged(name, schedule, least[name], None) for name, schedule in made]
    for each in _simulated(fresh, setting, fastest, memory_limit_bytes, everything):
        judged.append(each)
        looked_at[each.name]()
        if each.fits(memory_limit_bytes):
            fastest = min(fastest, each.weighed_seconds)
    names = [*in_order, *(each.name for each in before.judged), *(name for name, _ in made)]
    given = {name: number for number, name in enumerate(dict.fromkeys(names))}

    def order(each: Judged) -> tuple[bool, float, int]:
        """Return the sort key: what fits first, then by time; those as good as the best in the order given."""
        seconds = fastest if each.weighed_seconds <= fastest * SAME else each.weighed_seconds
        return not each.fits(memory_limit_bytes), seconds, given[each.name]

    return Judgement(tuple(sorted(judged, key=order)), before.misfits + tuple(misfits))


def _simulated(
    some: Sequence[Judged], setting: Setting, fastest: float, limit_bytes: int | None, everything: bool
) -> Iterator[Judged]:
    """Yield the schedules with predictions, the most promising first; without, where they cannot win.

    A schedule waits in order of the least that it takes, and each time that it is the first more is counted: its wires
    and the kernels of one rank; all that this rank does, pass by pass, the longest first; the kernels of all ranks, how
    it is weighed, and what that rank waits for.
    """
    waiting = [(each.seconds, at, each, ALL if everything else WIRES) for at, each in enumerate(some)]
    heapq.heapify(waiting)
    while waiting:
        least, at, each, counted = heapq.heappop(waiting)
        most = math.inf if everything else fastest * SAME
        if least > most:
            waits = counted == ALL and each.weighed_seconds <= most  # too long, which pieces may change
            yield replace(each, exceeds_seconds=most - each.risk_seconds) if waits else each
        elif counted == WIRES:
            each = replace(each, least=_with_one_more(each, setting))
            left = len(each.least.worked) < len(setting.passes)
            heapq.heappush(waiting, (each.seconds, at, each, WIRES if left else WORK))
        elif counted == WORK:
            whole = least_seconds(each.schedule, setting, (), each.least.wires)
            each = replace(each, least=whole.with_work(each.least.worked))
            heapq.heappush(waiting, (sum(each.least.with_waits) + each.risk_seconds, at, each, ALL))
        else:
            each = _predicted(each, setting, most - each.risk_seconds)
            if each.fits(limit_bytes):
                fastest = min(fastest, each.weighed_seconds)
            yield each


def _with_one_more(each: Judged, setting: Setting) -> Least:
    """Return the least with all that the rank does in one more pass: first in the last one, which has more to it."""
    least = each.least
    direction = setting.passes[-1 - len(least.worked)]
    return least.with_work((work_of(each.schedule, setting, least.busiest_rank, direction), *least.worked))


def _predicted(each: Judged, setting: Setting, most_seconds: float) -> Judged:
    """Return the schedule with its prediction; without, where it takes longer than `most_seconds`."""
    least, most = each.least.with_waits, most_seconds * ROUNDING
    found = predict_within(each.schedule, setting, most, least, wires=each.least.wires)
    return replace(each, prediction=found, exceeds_seconds=most_seconds if found is None else None)


def _all_above(limit_bytes: int, schedules: Sequence[Schedule], setting: Setting) -> list[int] | None:
    """Return what each needs at least, where all need more than the limit; else None, as soon as one may keep to it."""
    found = []
    for schedule in schedules:
        found.append(least_bytes(schedule, setting))
        if found[-1] <= limit_bytes:
            return None
    return found


def _made(
    choices: Iterable[Selection], before: Judgement, setting: Setting, most_seconds: float
) -> tuple[list[tuple[str, Schedule]], list[Candidate]]:
    """Return the schedules of those choices that can be made and are none of those there were, and the others.

    most_seconds: what takes longer by the kernels of one rank is not made, or by these and what it does beside them.
    """
    seen = {each.schedule.replace(name="") for each in before.judged}
    made: list[tuple[str, Schedule]] = []
    misfits: list[Candidate] = []
    for choice in choices:
        wanted = _Wanted(setting, most_seconds, choice.worked)
        try:
            make_if = choice.make_if if most_seconds < math.inf else None
            schedule = choice.make() if make_if is None else make_if(wanted)
            check_connections(schedule, setting)
        except NotWanted:
            misfits.append(Candidate(choice.name, None, None, None, None, None, None, wanted.why_not))
            choice.looked_at()
            continue
        except ConfigurationError as error:
            misfits.append(Candidate(choice.name, None, None, None, None, None, None, f"{MISFIT}: {error}"))
            choice.looked_at()
            continue
        nameless = schedule.replace(name="")
        if nameless in seen:
            choice.looked_at()
        else:
            seen.add(nameless)
            made.append((choice.name, schedule))
    return made, misfits


class _Wanted:
    """The question whether tiles may be those of the fastest schedule, and why they are not."""

    def __init__(self, setting: Setting, most_seconds: float, worked: Sequence[Worked]) -> None:
        self.setting, self.most_seconds, self.worked = setting, most_seconds, worked
        self.why_not = TOO_SLOW

    def __call__(self, tiles: Schedule) -> bool:
        """Return whether kernels of one rank end in time, and of the one that worked with what it did beside."""
        if least_seconds(tiles, self.setting, (most_laden(tiles),)).seconds > self.most_seconds:
            return False
        if not self.worked:
            return True
        self.why_not = TOO_MUCH
        kernels = least_seconds(tiles, self.setting, (self.worked[0].rank,)).kernel_seconds
        return kernels + sum(each.beside_seconds for each in self.worked) <= self.most_seconds


def check_connections(schedule: Schedule, setting: Setting) -> None:
    """Raise ConfigurationError for a schedule that needs more connections than the transport may have."""
    if setting.target.most_connections is not None:
        check_count(most_connected(schedule, setting.target, setting.passes), setting.target)


def check_count(found: int, target: Target) -> None:
    """Raise ConfigurationError for more connections at a rank than the transport may have."""
    if target.most_connections is not None and found > target.most_connections:
        raise ConfigurationError(f"it takes {found} communicators on a rank: {target.why_few_connections}")


# ---------- what is said of it


def _candidate(each: Judged, best: Judged, bound: Bound | None, limit: int | None) -> Candidate:
    found, reason = each.prediction, _why(each, best, limit)
    seconds = None if bound is None else bound.seconds
    if found is None:
        return Candidate(each.name, None, None, None, None, each.needs_bytes, seconds, reason)
    return Candidate(
        each.name, found.seconds, found.compute_seconds, found.exposed_seconds, found.wires.worst_bytes,
        found.peak_bytes, seconds, reason, *connected(found.connections, found.connection_bytes),
    )  # fmt: skip


def connected(connections: int, connection_bytes: int) -> tuple[int | None, int | None]:
    """Return the number of connections and their bytes as a candidate shows them: None where they take no memory."""
    return (connections, connection_bytes) if connection_bytes else (None, None)


def _why(each: Judged, best: Judged, limit: int | None) -> str:
    """Return why the schedule wins or loses, in a few words."""
    found = each.prediction
    if found is None and each.needs_bytes is not None and each.needs_bytes > (limit or 0):
        return over_limit(each.needs_bytes, limit or 0, " at least")
    if found is None:
        return _why_not_simulated(each)
    if not each.fits(limit):
        return over_limit(found.peak_bytes, limit or 0)
    if each is best:
        return f"the fastest, {_binding(found)}"
    assert best.prediction is not None
    slower = found.seconds / best.prediction.seconds - 1
    if slower <= -NOTHING:
        return f"{slower:+.0%}, at more risk: {wires_need(found.wires)}"
    return f"{slower:+.0%}: {_cause(found, best.prediction)}" if slower >= NOTHING else "as fast"


def _why_not_simulated(each: Judged) -> str:
    """Return why a schedule cannot win that was not simulated, or not to its end."""
    least = each.least
    if each.exceeds_seconds is not None:
        risk = f", or at more risk, since {wires_need(least.wires)}" if each.risk_seconds else ""
        return f"over {time_text(each.exceeds_seconds)}{risk}: its simulation was given up there"
    if least.work_seconds > max(least.wire_seconds, least.kernel_seconds) * SAME:
        return f"kernels, copies and merges of one rank alone take {time_text(least.work_seconds)}"
    if least.seconds > max(least.wire_seconds, least.kernel_seconds) * SAME:
        return f"its passes, each by its wires or its work alone, take {time_text(least.seconds)}"
    if least.wire_seconds < least.kernel_seconds:
        return f"its kernels alone take {time_text(least.kernel_seconds)}"
    return wires_need(least.wires, " alone")


def _cause(found: Prediction, best: Prediction) -> str:
    """Return where most of the time goes that it takes longer than the best."""
    if found.wires.seconds > 0.8 * found.seconds:
        return wires_need(found.wires)
    kernels = found.compute_seconds - best.compute_seconds
    waits = found.exposed_seconds - best.exposed_seconds
    if waits >= max(kernels, (found.seconds - best.seconds) / 2):
        return f"{time_text(found.exposed_seconds)} are not hidden"
    if kernels >= (found.seconds - best.seconds) / 2:
        return f"its kernels take {time_text(found.compute_seconds)}"
    return "more copies, merges and messages"


def wires_need(wires: Busiest, alone: str = "") -> str:
    """Return how long its transfers take at least, as text: by one wire, or by one of each pass."""
    which, need = ("its busiest wire", "needs") if wires.is_one else ("the busiest wires of its passes", "need")
    return f"{which}{alone} {need} {time_text(wires.seconds)}"


def _binding(found: Prediction) -> str:
    wires = found.wires
    if wires.is_one:
        name = f"wire {wires.worst}"
    else:
        name = "wires " + " and ".join(f"{each.wire} in {each.direction}" for each in wires.of_passes)
    return binding_text(found.seconds, found.compute_seconds, found.exposed_seconds, name, wires.seconds)


def binding_text(
    seconds: float, compute_seconds: float, exposed_seconds: float, wire: str, wire_seconds: float
) -> str:
    """Return what a schedule of so many seconds in all is bound by: kernels, a wire (of each pass), or neither.

    Then it is by what it waits for, or by the busiest rank's other work, whichever takes longer.
    """
    kernels, moves = (part / seconds if seconds else 0.0 for part in (compute_seconds, wire_seconds))
    if max(kernels, moves) < BINDS:
        waits = exposed_seconds >= seconds - compute_seconds - exposed_seconds
        what = "messages and waits" if waits else "launches, copies and merges"
        return f"bound by {what} (kernels {kernels:.0%}, {wire} {moves:.0%} of the time)"
    return f"bound by {'kernels' if kernels >= moves else wire} ({max(kernels, moves):.0%} of the time)"


def _reason(judged: Sequence[Judged], setting: Setting, bound: Bound | None, limit: int | None) -> str:
    """Return the reason in one line: schedule, interconnect, time, ratio to the bound, and time of the next."""
    best, net = judged[0], setting.interconnect
    assert best.prediction is not None
    took = best.prediction.seconds
    text = f"{best.name}: {time_text(took)} predicted for {' + '.join(setting.passes)} on {net.name}"
    if bound is not None and bound.seconds > 0:
        text += f", {took / bound.seconds:.2f} × the lower bound"
    text += f", {_binding(best.prediction)}"
    simulated = [each for each in judged[1:] if each.fits(limit)]
    others = [each.seconds for each in judged[1:] if each.prediction is None and each.needs_bytes is None]
    if simulated and simulated[0].seconds <= min(others, default=math.inf):
        text += f"; next {simulated[0].name} with {time_text(simulated[0].seconds)}"
    elif others and min(others) > took:
        text += f"; all others take more than {time_text(min(others))}"
    return "; ".join([text, *net.notes])


def _nothing_fits(found: Judgement, setting: Setting, limit: int | None) -> ConfigurationError:
    judged, misfits = found.judged, found.misfits
    if judged and limit is not None:
        known = [(each, least) for each in judged if (least := _needed(each)) is not None]
        best, need = smallest(known, lambda each: needs(each.schedule, setting))
        error = MemoryLimitError(too_little_text(limit, best.name, need, setting.target))
        error.needs_bytes = need.peak_bytes
        return error
    wrong = MemoryLimitError if judged else ConfigurationError
    if misfits:
        return wrong(f"no schedule fits: {misfits[0].name}: {misfits[0].reason}")
    return wrong("there is no schedule to choose from")


def _needed(each: Judged) -> int | None:
    """Return the bytes that it needs, as predicted or at least; None if they were not computed."""
    return each.needs_bytes if each.prediction is None else each.prediction.peak_bytes


def too_little_text(limit: int, name: str, need: HeldBytes, target: Target) -> str:
    """Return a text that no schedule fits, what the smallest needs and for what, and what would help."""
    peak_bytes, connections, connection_bytes = need
    fewest = target.pair_serial and target.channels == 1  # one connection for all between two ranks
    way_out = "" if fewest else ", or a transport with fewer communicators (docs/transports.md)"
    connected = f", {mb_text(connection_bytes)} of it for {connections} communicators"
    return (
        f"no schedule fits in {mb_text(limit)} a rank; the smallest needs {mb_text(peak_bytes)}"
        f"{connected if connection_bytes else ''}: raise the limit, use more ranks or a shorter sequence"
        f"{way_out if connection_bytes else ''} (it is {name}; {mb_text(peak_bytes - connection_bytes)} are for what "
        f"arrives from others and what forward keeps for backward, and the rank's own q, k, v and out come on top)"
    )
