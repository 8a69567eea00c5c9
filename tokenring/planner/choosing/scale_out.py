"""Worlds too large to simulate rank by rank: one host stands for all, and time grows in proportion to the hosts.

A schedule is folded (symmetry.py) on all hosts if it has few tiles, else on few hosts, twice: every host added brings
as many tokens, tiles and messages for each rank as the one before, so that time, compute and bytes lie on a
straight line (docs/planner.md says how straight). A mask counts by the share of pairs that it leaves, which balanced
layouts give to every rank alike; bytes are those without a mask. Of masks that leave ranks unequally much this is
no more than a guess (`mask_density.is_even`).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from tokenring.display.units import time_text
from tokenring.errors import ConfigurationError, MemoryLimitError
from tokenring.lowering.footprint import HeldBytes
from tokenring.planner.bounds.bound import Bound
from tokenring.planner.choosing.candidates import Candidate, over_limit
from tokenring.planner.choosing.folded_world import (
    CHAINED,
    NO_TIME,
    DrawnOut,
    Figures,
    FoldedWorld,
    folded_net,
    tiles_of_host,
)
from tokenring.planner.choosing.judged import Progress
from tokenring.planner.choosing.plan import Forecast
from tokenring.planner.choosing.select import ROUNDING, SAME, binding_text, check_count, connected, too_little_text
from tokenring.planner.choosing.symmetry import FoldedNet
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.simulation.predict import Setting
from tokenring.planner.simulation.simulate import TakesLonger
from tokenring.schedule.families.registry import check_fit, parse
from tokenring.schedule.scheme import Scheme
from tokenring.sequence.layout import Layout

FEW_HOSTS = 2  # at least, of the smaller of two worlds
HOPELESS = 1.25  # times the time of the best so far, both as few hosts show them where not all are folded
LEAST_HOSTS = 4 * FEW_HOSTS  # equal ones, of which one stands for all
FINAL = 4  # schedules that are looked at on twice as many
MOST_TILES = 6_000
GROWS_FIRST = frozenset({"tiles", "mesh-kv", "mesh-q"})  # families whose first parameter grows with the hosts
CROWDED = frozenset({"uneven"})  # whose busiest ranks compute more the more hosts there are: on no straight line


@dataclass(frozen=True)
class Task:
    """The workload that is planned for, as far as one host shows it.

    share: of all (query, key) pairs, how many the mask leaves. layouts: of q and of kv, whose chunks pieces must
    divide. notes: what the mask and the layouts change that the time does not count. most_tiles: of one host, that are
    folded as they are; schedules with more are drawn out from a few hosts. known: worlds folded before; nets:
    theirs, by how many hosts.
    """

    setting: Setting
    share: float = 1.0
    layouts: tuple[Layout | None, Layout | None] = (None, None)
    notes: tuple[str, ...] = ()
    most_tiles: int = MOST_TILES
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)
    known: dict[tuple[str, int], FoldedWorld] = field(init=False, default_factory=dict, compare=False, repr=False)
    nets: dict[int, FoldedNet] = field(init=False, default_factory=dict, compare=False, repr=False)

    def world(self, name: str, hosts: int, unit: int) -> FoldedWorld:
        """Return the schedule folded on so many hosts. Raises ConfigurationError if it does not fold."""
        if (name, hosts) not in self.known:
            if hosts not in self.nets:
                self.nets[hosts] = folded_net(self.setting.interconnect, hosts, unit)
            self.known[name, hosts] = FoldedWorld(name, self.setting, self.share, hosts, unit, self.nets[hosts])
        return self.known[name, hosts]


def is_large(net: Interconnect, most_ranks: int) -> bool:
    """Return whether there are many ranks, in enough equal hosts to fold."""
    return net.world_size > most_ranks and has_equal_hosts(net) and len(net.fabrics) >= LEAST_HOSTS


def promising(names: list[str], task: Task, best: int) -> tuple[list[str], list[str]]:
    """Return the best of these schedules by what one of several equal hosts does; and those that cannot be judged so.

    Far cheaper than simulating all ranks: flows grow with their square, and rates with the flows.
    """
    judged = list(_judged(_distinct(names), task, best))
    found = sorted((each.seconds, name) for name, each in judged if isinstance(each, Figures))
    unknown = [name for name, each in judged if isinstance(each, ConfigurationError)]
    return [name for _, name in found[:best]], unknown


def _distinct(names: list[str]) -> list[str]:
    """Return the names without those that fold into the same as others: folded, chunks move whole anyway."""
    return [name for name in names if not (name.endswith("/pieces1") and name.removesuffix("/pieces1") in names)]


def _judged(
    names: list[str], task: Task, best: int, times: float = 1.0, limit_bytes: float = math.inf
) -> Iterator[tuple[str, Figures | ConfigurationError | None]]:
    """Yield the figures, or why there are none; None where it takes more than so many times as long as enough others.

    best: so many that keep to the limit are enough. Those that need least come first: by bounds that look deeper pass
    by pass, the last pass first, which has most to it.
    """
    fastest = [math.inf] * best  # of what keeps to the limit
    waiting: list[tuple[float, int, str, int]] = []  # the last: how many looks were taken
    task.progress.known += len(names)
    for at, name in enumerate(names):
        try:
            waiting.append((_least_seconds(name, task, 0), at, name, 0))
        except ConfigurationError as error:
            task.progress.looked_at += 1
            yield name, error
    heapify(waiting)
    while waiting:
        least, at, name, looks = heappop(waiting)
        most = ROUNDING * times * fastest[best - 1]
        if looks < CHAINED * len(task.setting.passes) and least <= most:
            heappush(waiting, (_least_seconds(name, task, looks + 1), at, name, looks + 1))
            continue
        task.progress.looked_at += 1
        try:
            each = figures(name, task, FEW_HOSTS, most) if least <= most else None
            if each is not None:
                check_count(round(each.connections), task.setting.target)
                insort(fastest, each.seconds if each.peak_bytes <= limit_bytes else math.inf)
        except ConfigurationError as error:
            yield name, error
        else:
            yield name, each


def _least_seconds(name: str, task: Task, looks: int) -> float:
    """Return what the schedule takes at least on all hosts, after so many looks: each goes deeper into one pass.

    The last pass comes first each time. Raises ConfigurationError if it does not fold.
    """
    world, passes = _world(name, task, FEW_HOSTS), task.setting.passes
    depths = ((looks + at) // len(passes) for at in range(len(passes)))  # of each pass
    return sum(world.least_seconds(each, depth) for each, depth in zip(passes, depths, strict=True))


def _folds_whole(name: str, task: Task) -> bool:
    """Return whether all hosts are folded, or none: what is known of the fastest is then not looked at again."""
    try:
        return isinstance(_world(name, task, FEW_HOSTS), FoldedWorld)
    except ConfigurationError:
        return True


def has_equal_hosts(net: Interconnect) -> bool:
    """Return whether one of several hosts can stand for all."""
    return net.local is not None and len(net.fabrics) > 1 and len({id(fabric) for fabric in net.fabrics}) == 1


def forecast(
    names: list[str], task: Task, bound: Bound, memory_limit_bytes: int | None, fastest_alone: bool = False
) -> Forecast:
    """Return the forecast of the best of these schedules. Raises ConfigurationError where nothing fits.

    fastest_alone: figures of others are not wanted; where all hosts are folded, slower schedules get none.
    """
    found: list[tuple[str, Figures]] = []
    slow: list[Candidate] = []
    misfits: dict[str, Candidate] = {}  # one of a family stands for all
    names = _distinct(names)
    limit = float("inf") if memory_limit_bytes is None else memory_limit_bytes
    if memory_limit_bytes is not None and (least := _all_above(limit, names, task)) is not None:
        raise MemoryLimitError(too_little_text(memory_limit_bytes, *least, task.setting.target))
    times = SAME if fastest_alone and all(_folds_whole(name, task) for name in names) else HOPELESS
    late = "slower" if times == SAME else f"over {HOPELESS} × as slow"
    for name, each in _judged(names, task, 1, times, limit):
        if isinstance(each, Figures):
            found.append((name, each))
        elif each is None:
            slow.append(Candidate(name, None, None, None, None, None, bound.seconds, late))
        else:
            family = name.partition("/")[0]
            misfits.setdefault(family, Candidate(name, None, None, None, None, None, None, f"not planned: {each}"))
    found = _ranked(_looked_at_again(_ranked(found, limit), task), limit)
    if not found or found[0][1].peak_bytes > limit:
        raise (MemoryLimitError if found else ConfigurationError)(_nothing(found, misfits.values(), task, limit))
    best = found[0][1]
    candidates = [_candidate(name, each, best, task, bound, limit) for name, each in found]
    return Forecast(
        found[0][0],
        task.setting.workload,
        _reason([each for each in found if each[1].peak_bytes <= limit], task, bound, times == SAME and bool(slow)),
        (*candidates, *slow, *misfits.values()),
    )


def _all_above(limit: float, names: Iterable[str], task: Task) -> tuple[str, HeldBytes] | None:
    """Return the schedule that needs least, where all need more than the limit; else None, once one may keep to it.

    Without simulating any of them, which takes several times as long.
    """
    found: list[tuple[str, HeldBytes]] = []
    for name in names:
        try:
            need = needed(name, task)
        except ConfigurationError:
            continue
        if need.peak_bytes <= limit:
            return None
        found.append((name, need))
    return min(found, key=lambda each: each[1].peak_bytes, default=None)


def _ranked(found: Iterable[tuple[str, Figures]], limit: float) -> list[tuple[str, Figures]]:
    """Return the schedules sorted: those that fit first, then by time."""
    return sorted(found, key=lambda each: (each[1].peak_bytes > limit, each[1].seconds, each[0]))


def _looked_at_again(ranked: list[tuple[str, Figures]], task: Task) -> Iterator[tuple[str, Figures]]:
    """Yield the schedules, the first of them with figures of twice as many hosts."""
    for name, known in ranked[:FINAL]:
        again = figures(name, task, 2 * FEW_HOSTS, float("inf"))
        yield name, known if again is None else again
    yield from ranked[FINAL:]


def _nothing(found: list[tuple[str, Figures]], misfits: Iterable[Candidate], task: Task, limit: float) -> str:
    """Return why there is no plan."""
    if found:
        name, least = min(found, key=lambda each: each[1].peak_bytes)
        return too_little_text(int(limit), name, least.needs, task.setting.target)
    why = next((f": {each.name}: {each.reason}" for each in misfits), "")
    return f"no schedule can be planned for so many ranks{why}"


def _reason(fitting: list[tuple[str, Figures]], task: Task, bound: Bound, others: bool) -> str:
    """Return one line: what, on what, how long, how far from the bound, what the next would cost, what is left out."""
    (name, best), net = fitting[0], task.setting.interconnect
    text = f"{name}: {time_text(best.seconds)} predicted for {' + '.join(task.setting.passes)} on {net.name}"
    if bound.seconds > 0:
        text += f", {best.seconds / bound.seconds:.2f} × the lower bound"
    text += f", {_binding(best, task)}"
    if len(fitting) > 1:
        text += f"; next {fitting[1][0]} with {time_text(fitting[1][1].seconds)}"
    elif others:
        text += "; all others are slower"
    return "; ".join([text, "one host stands for all, bytes as without a mask", *task.notes, *net.notes])


def _binding(best: Figures, task: Task) -> str:
    wire = "its busiest wire" if len(task.setting.passes) == 1 else "the busiest wire of each pass"
    return binding_text(best.seconds, best.compute_seconds, best.exposed_seconds, wire, best.worst_wire_seconds)


def _candidate(name: str, each: Figures, best: Figures, task: Task, bound: Bound, limit: float) -> Candidate:
    slower = each.seconds / best.seconds - 1
    lost = f"{slower:+.0%}: {time_text(each.exposed_seconds)} are not hidden"
    reason = f"the fastest, {_binding(best, task)}" if each is best else lost
    if each.peak_bytes > limit:
        reason = over_limit(int(each.peak_bytes), int(limit))
    connections = connected(round(each.connections), round(each.connection_bytes))
    return Candidate(
        name, each.seconds, each.compute_seconds, each.exposed_seconds, round(each.worst_wire_bytes),
        round(each.peak_bytes), bound.seconds, reason, *connections,
    )  # fmt: skip


# ---------- one schedule


def figures(name: str, task: Task, few_hosts: int, hopeless_seconds: float) -> Figures | None:
    """Return the figures of one schedule on all hosts, on the line through a few and twice as many.

    Returns None as soon as it takes longer than `hopeless_seconds`. Raises ConfigurationError if it does not fold or
    fit.
    """
    world, passes = _world(name, task, few_hosts), task.setting.passes
    total = NO_TIME
    least = {each: world.least_seconds(each) if hopeless_seconds < math.inf else 0.0 for each in passes}
    for direction in reversed(passes):
        rest_seconds = sum(least[each] for each in passes[: passes.index(direction)])
        try:
            one = world.one_pass(direction, hopeless_seconds - total.seconds - rest_seconds)
        except TakesLonger:
            return None
        total = one.and_then(total)
        if total.seconds > hopeless_seconds:
            return None
    return total


def needed(name: str, task: Task) -> HeldBytes:
    """Return what `figures` would say that a schedule needs. Raises ConfigurationError if it does not fold or fit."""
    world, total = _world(name, task, FEW_HOSTS), NO_TIME
    for direction in task.setting.passes:
        total = total.and_then(world.holds(direction))
    return total.needs


def _world(name: str, task: Task, few_hosts: int) -> FoldedWorld | DrawnOut:
    """Return the schedule on all hosts: folded, or drawn out from at least so many and twice as many."""
    net = task.setting.interconnect
    hosts, unit = len(net.fabrics), net.world_size // len(net.fabrics)
    scheme = parse(name).make(net.world_size)
    check_fit(name, scheme, task.setting.workload, *task.layouts)
    few = _few_hosts(scheme, unit, few_hosts)
    if tiles_of_host(scheme, net.world_size, unit) <= task.most_tiles or 2 * few >= hosts:
        return task.world(name, hosts, unit)
    small, large = (task.world(_shrunk(name, hosts // some), some, unit) for some in (few, 2 * few))
    return DrawnOut(small, large, (hosts - few) / few)


def _few_hosts(scheme: Scheme, unit: int, few: int) -> int:
    """Return at least so many hosts, and so many that every head group has several ranks."""
    while few * unit < 4 * scheme.head_groups:
        few *= 2
    return few


def _shrunk(name: str, times: int) -> str:
    """Return the name of the schedule for a world so many times smaller. Raises ConfigurationError if none."""
    named = parse(name)
    if named.family.name not in GROWS_FIRST | CROWDED:
        return name
    first, *rest = named.parameters
    if first % times or named.family.name in CROWDED:
        raise ConfigurationError(f"schedule {name!r} is too large to be planned")
    return name.replace(named.family.written(named.parameters), named.family.written((first // times, *rest)), 1)
