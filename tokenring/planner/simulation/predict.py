"""Predictions of what a schedule costs: its programs, lowered as they would run, simulated pass by pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tokenring.ir.schedule_data import Pass, ScheduleData
from tokenring.lowering.calls import Supports, anything, calls_of_rank
from tokenring.lowering.footprint import Pools, connections_by_rank, held, kept_bytes, link_bytes
from tokenring.lowering.lower import agenda_of, lower_agenda
from tokenring.lowering.program import Program
from tokenring.lowering.storage import Storage, storage_of
from tokenring.lowering.target import IDEAL, Contacts, Target, contacts
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.simulation.chained import chained_seconds
from tokenring.planner.simulation.operations import Compute, Costs, Operation, alone_seconds, busy_seconds
from tokenring.planner.simulation.simulate import Outcome, TakesLonger, simulate
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine

FEW_RANKS = 16  # up to which wires are shared out anew for every transfer
NO_WIRE = "none"  # where nothing moves
WINDOW_SHARE = 1e-3  # of the longest rank's kernels: predictions grow by 0.4% at most, planning takes half as long


class OfPass(NamedTuple):
    """The wire that needs longest for what one pass puts on it, for the bytes alone."""

    direction: Pass
    wire: str
    seconds: float


class Busiest(NamedTuple):
    """The wires that transfers are bound by: the one that needs longest for all passes together, and each pass's own.

    worst, worst_bytes: of all passes together; "none" where nothing moves. of_passes: of equals, the worst of all.
    """

    worst: str
    worst_bytes: int
    of_passes: tuple[OfPass, ...]

    @property
    def seconds(self) -> float:
        """Seconds that the passes need one after another, each for its own busiest wire."""
        return sum(each.seconds for each in self.of_passes)

    @property
    def is_one(self) -> bool:
        """True if one wire is the busiest of every pass."""
        return all(each.wire == self.worst for each in self.of_passes)


@dataclass(frozen=True)
class Prediction:
    """Some passes of a schedule, one after another.

    compute_seconds: of the rank that computes longest, kernels alone; of all of them where those share too few cores.
    exposed_seconds: what the passes take beyond the busiest rank's own work. wires: what binds their transfers.
    peak_bytes: buffers, what forward keeps for backward, and connections, of the rank that needs most in all.
    connections: of the rank that has most, which take connection_bytes of device memory (0 where they take none).
    kept: the passes, to be simulated again over other queues, where more connections are made than are advised.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    wires: Busiest
    peak_bytes: int
    connections: int = 0
    connection_bytes: int = 0
    outcomes: tuple[Outcome, ...] = ()
    kept: tuple[_PassToSimulate, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Setting:
    """The setting in which a schedule is judged: a workload and its passes, on an interconnect and a machine."""

    workload: Workload
    interconnect: Interconnect
    machine: Machine
    passes: tuple[Pass, ...]
    supports: Supports = anything
    target: Target = IDEAL

    @property
    def early_receives(self) -> bool:
        """True if receives are posted early: in one queue with sends they would block what they wait for."""
        return self.target.early_receives and not self.machine.messages.pair_serial


class Worked(NamedTuple):
    """Describe what a rank does in a pass.

    alone_seconds: kernels, copies, merges, posts, each no earlier than it is launched. beside_seconds: without kernels
    and launches. chained_seconds: with what it waits for, as if all others were always ready. Pieces wait for less: so
    this last says what cannot win as it is, and never what to try in pieces.
    """

    rank: int
    alone_seconds: float
    beside_seconds: float
    chained_seconds: float


class Least(NamedTuple):
    """The least that a schedule needs, as its parts overlap at best.

    of_passes: seconds of each pass. kernel_seconds: as a prediction's compute_seconds, of the ranks that were looked
    at. busiest_rank: of these, the one whose kernels take longest in the last pass. worked: what one such rank does, in
    the last passes, as many as were counted.
    """

    of_passes: tuple[float, ...]
    wires: Busiest
    kernel_seconds: float
    busiest_rank: int
    worked: tuple[Worked, ...] = ()

    @property
    def with_waits(self) -> tuple[float, ...]:
        """Seconds that each pass takes at least, as it is."""
        return self._at_least([each.chained_seconds for each in self.worked])

    @property
    def work_seconds(self) -> float:
        """Seconds of all that the rank does in the passes that were counted."""
        return sum(each.alone_seconds for each in self.worked)

    @property
    def seconds(self) -> float:
        """Seconds of all passes together."""
        return sum(self.of_passes)

    @property
    def wire_seconds(self) -> float:
        """Seconds of the busiest wire of each pass, for the bytes alone."""
        return self.wires.seconds

    def with_work(self, worked: tuple[Worked, ...]) -> Least:
        """Return the least where the busiest rank does so much in the last passes."""
        return self._replace(of_passes=self._at_least([each.alone_seconds for each in worked]), worked=worked)

    def _at_least(self, of_last: Sequence[float]) -> tuple[float, ...]:
        """Return the seconds of each pass where the last ones take at least so long."""
        first = len(self.of_passes) - len(of_last)
        return (*self.of_passes[:first], *map(max, self.of_passes[first:], of_last))


def least_seconds(
    schedule: ScheduleData, setting: Setting, some_ranks: Sequence[int] = (), wires: Busiest | None = None
) -> Least:
    """Return the least that a schedule needs: far cheaper than a prediction, and never above it.

    some_ranks: whose kernels are looked at; none: those of all. wires: the busiest, where they are known.
    """
    storage, wires = storage_of(schedule), busiest(schedule, setting) if wires is None else wires
    ranks = some_ranks or _ranks(schedule)
    kernels, of_ranks = [], [0.0]
    for direction in setting.passes:
        costs = Costs(schedule, setting.workload, direction, setting.machine.rates)
        of_ranks = [kernels_of_rank(storage, rank, setting.supports, costs) for rank in ranks]
        kernels.append(setting.machine.kernel_seconds(of_ranks))
    net = setting.interconnect
    moving = [each.seconds - _burst_seconds(each.wire, net) for each in wires.of_passes]
    return Least(tuple(map(max, moving, kernels)), wires, sum(kernels), ranks[of_ranks.index(max(of_ranks))])


def most_laden(schedule: ScheduleData) -> int:
    """Return the rank whose tiles have most pairs of blocks."""
    load: Counter[int] = Counter()
    for tile in schedule.tiles:
        load[tile.rank] += len(tile.q) * len(tile.kv)
    return max(load, key=load.__getitem__, default=0)


def kernels_of_rank(storage: Storage, rank: int, supports: Supports, costs: Costs) -> float:
    """Return the seconds of all kernels of a rank in the pass of these costs: nothing has to be lowered for them."""
    of_tiles = calls_of_rank(storage, rank, supports)
    return sum(costs.kernel_seconds(call.patch) for _, made in of_tiles for call in made)


def work_of(schedule: ScheduleData, setting: Setting, rank: int, direction: Pass) -> Worked:
    """Return what a rank does in a pass, alone and with what it waits for: no pass takes less."""
    costs = Costs(schedule, setting.workload, direction, setting.machine.rates)
    post_seconds = setting.machine.messages.post_seconds
    (program,) = lowered(schedule, setting, direction, [rank])
    made = costs.operations(program)
    beside = sum(busy_seconds(each, post_seconds) for each in made) - kernel_seconds_of(made)
    return Worked(rank, alone_seconds(made, post_seconds), beside, _chained({rank: made}, setting, whole=False))


def _chained(programs: Mapping[int, Sequence[Operation]], setting: Setting, whole: bool = True) -> float:
    machine = setting.machine
    return chained_seconds(
        programs, setting.interconnect, machine.messages, start_seconds=machine.start_seconds, whole=whole
    )


def wire_bytes(schedule: ScheduleData, setting: Setting, direction: Pass) -> dict[str, int]:
    """Return the bytes that one pass puts on each wire."""
    loads: dict[str, int] = {}
    for (src, dst), nbytes in link_bytes(schedule, setting.workload, direction).items():
        for wire in setting.interconnect.way(src, dst):
            loads[wire] = loads.get(wire, 0) + nbytes
    return loads


def busiest(schedule: ScheduleData, setting: Setting) -> Busiest:
    """Return the wires that need longest for what the passes put on them."""
    net = setting.interconnect
    loads = {direction: wire_bytes(schedule, setting, direction) for direction in setting.passes}
    total: Counter[str] = Counter()
    for one in loads.values():
        total.update(one)
    worst = _worst(total, net)
    of_passes = tuple(_of_pass(direction, one, worst, net) for direction, one in loads.items())
    return Busiest(worst, total[worst], of_passes)


def _of_pass(direction: Pass, loads: Mapping[str, int], worst: str, net: Interconnect) -> OfPass:
    wire = _worst(loads, net)
    seconds = _wire_seconds(loads, wire, net)
    return OfPass(direction, worst if _wire_seconds(loads, worst, net) == seconds else wire, seconds)


def _worst(loads: Mapping[str, int], net: Interconnect) -> str:
    return max(loads, key=lambda wire: (_wire_seconds(loads, wire, net), wire), default=NO_WIRE)


def _wire_seconds(loads: Mapping[str, int], wire: str, net: Interconnect) -> float:
    return loads[wire] / net.gbs(wire) / 1e9 if wire in loads else 0.0


def _burst_seconds(wire: str, net: Interconnect) -> float:
    return 0.0 if wire == NO_WIRE else net.burst_bytes(wire) / net.gbs(wire) / 1e9


def predict(schedule: ScheduleData, setting: Setting, record: bool = False) -> Prediction:
    """Predict what a schedule costs: lower it, simulate its passes and add up."""
    found = predict_within(schedule, setting, math.inf, [0.0 for _ in setting.passes], record)
    assert found is not None  # nothing takes longer
    return found


def predict_within(
    schedule: ScheduleData,
    setting: Setting,
    most_seconds: float,
    least_of_passes: Sequence[float],
    record: bool = False,
    wires: Busiest | None = None,
) -> Prediction | None:
    """Predict what a schedule costs; return None as soon as it is known to take longer than `most_seconds`.

    least_of_passes: seconds that each pass takes at least. wires: the busiest, where they are known.
    """
    spare_seconds, passes = most_seconds - sum(least_of_passes), []
    # The last pass first: it has more to it, and may show alone that the others need not be lowered.
    for direction, least in zip(reversed(setting.passes), reversed(least_of_passes), strict=True):
        passes.append(one := _PassToSimulate(schedule, setting, direction, least, most_seconds < math.inf))
        spare_seconds -= one.least_seconds - least
        if spare_seconds < 0:  # nothing is simulated of what all passes rule out together
            return None
    passes.reverse()
    used, advised = contacts(schedule, setting.target, setting.passes), setting.target.advised_connections
    keep = advised is not None and max(connections_by_rank(used.links, setting.target, schedule.world_size)) > advised
    wires = busiest(schedule, setting) if wires is None else wires
    return _added_up(passes, used, wires, spare_seconds, record, keep)


def predict_over(found: Prediction, schedule: ScheduleData, setting: Setting, most_seconds: float) -> Prediction | None:
    """Predict what was predicted and kept, now over other queues; None where it takes longer than `most_seconds`.

    setting: the same, over a transport for which programs are the same.
    """
    passes = [one.over(setting) for one in found.kept]
    spare_seconds = most_seconds - sum(one.least_seconds for one in passes)
    used = contacts(schedule, setting.target, setting.passes)
    return _added_up(passes, used, found.wires, spare_seconds, record=False, keep=False)


def _added_up(
    passes: Sequence[_PassToSimulate], used: Contacts, wires: Busiest, spare_seconds: float, record: bool, keep: bool
) -> Prediction | None:
    """Return the passes simulated, one after another; None where they need longer than they may."""
    made = []
    for one in passes:
        try:
            made.append(one.simulated(spare_seconds + one.least_seconds, record, keep))
        except TakesLonger:
            return None
        spare_seconds -= made[-1][0].seconds - one.least_seconds
    pools = [max(of_rank) for of_rank in zip(*(pools for _, _, pools in made), strict=True)]
    return Prediction(
        sum(outcome.seconds for outcome, _, _ in made),
        sum(kernels for _, kernels, _ in made),
        sum(outcome.exposed_seconds for outcome, _, _ in made),
        wires,
        *held(used, passes[0].setting.target, pools),
        tuple(outcome for outcome, _, _ in made) if record else (),
        tuple(passes) if keep else (),
    )


class _PassToSimulate:
    """One pass of a schedule, lowered for all ranks: what it takes at least, and simulated what it takes."""

    def __init__(
        self, schedule: ScheduleData, setting: Setting, direction: Pass, least_seconds: float, limited: bool
    ) -> None:
        self.setting, workload = setting, setting.workload
        costs = Costs(schedule, workload, direction, setting.machine.rates)
        self.programs: list[Sequence[Operation]] = []
        self.pools = Pools(schedule, workload, setting.target)
        for program in lowered(schedule, setting, direction):
            self.programs.append(costs.operations(program))
            self.pools.add(program, kept_bytes(schedule, workload, program))
        chained = _chained(dict(enumerate(self.programs)), setting) if limited else 0.0
        self.least_seconds = max(least_seconds, chained)

    def over(self, setting: Setting) -> _PassToSimulate:
        """Return the pass, simulated or not, in another setting in which the programs are the same."""
        other = copy(self)
        other.setting = setting
        return other

    def simulated(self, most_seconds: float, record: bool, keep: bool) -> tuple[Outcome, float, list[int]]:
        """Return the outcome, what kernels take at least, and what each rank holds. Raises TakesLonger."""
        machine, programs = self.setting.machine, self.programs
        kernels = machine.kernel_seconds([kernel_seconds_of(program) for program in programs])
        window = WINDOW_SHARE * kernels if len(programs) > FEW_RANKS else 0.0
        outcome = simulate(
            self.setting.interconnect, programs, machine.messages, record,
            cores=machine.shared_cores, sharing_seconds=window, kernels_share=machine.kernels_share,
            start_seconds=machine.start_seconds, most_seconds=most_seconds,
        )  # fmt: skip
        if not keep:
            self.programs = []  # large
        return outcome, kernels, self.pools.nbytes()


def lowered(
    schedule: ScheduleData, setting: Setting, direction: Pass, ranks: Iterable[int] | None = None
) -> Iterator[Program]:
    """Yield the programs of one pass as the setting's transport would run it, on these ranks, or on all."""
    storage, workload = storage_of(schedule), setting.workload
    target = replace(setting.target, early_receives=setting.early_receives)
    for rank in _ranks(schedule) if ranks is None else ranks:
        agenda = agenda_of(storage, rank, direction, workload, setting.supports)
        yield lower_agenda(agenda, workload, target)


def _ranks(schedule: ScheduleData) -> range:
    return range(schedule.world_size)


def kernel_seconds_of(program: Sequence[Operation]) -> float:
    """Return the seconds that a rank's kernels take in all."""
    return sum(each.seconds for each in program if isinstance(each, Compute) and each.kernel)
