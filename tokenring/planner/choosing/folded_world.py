"""One of many equal hosts, which stands for all: what a schedule costs there, pass by pass."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import Pass
from tokenring.lowering.calls import anything
from tokenring.lowering.footprint import HeldBytes, held, kept_bytes, link_bytes, program_bytes
from tokenring.lowering.lower import lower
from tokenring.lowering.program import Program
from tokenring.lowering.storage import storage_of
from tokenring.lowering.target import Contacts, Target, links
from tokenring.planner.choosing.symmetry import FoldedNet, folded, symmetry_of
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.simulation.chained import chained_seconds
from tokenring.planner.simulation.operations import Costs, Operation, operations
from tokenring.planner.simulation.predict import WINDOW_SHARE, Setting, kernel_seconds_of, kernels_of_rank
from tokenring.planner.simulation.simulate import TakesLonger, simulate
from tokenring.schedule.families.registry import parse
from tokenring.schedule.scheme import Scheme
from tokenring.tables.rates import Rates

TOO_MANY_TILES = 40_000  # of one host: a schedule with more is not looked at
LEAST_SHARE = 1e-12  # of pairs that are visible, where none is
HELD = ("peak_bytes", "connections", "connection_bytes")  # is there all along, and does not add up


@dataclass(frozen=True)
class Figures:
    """Figures of a schedule on some hosts; all grow on a straight line. Of wires, those of each pass's busiest."""

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    worst_wire_bytes: float
    worst_wire_seconds: float
    peak_bytes: float
    connections: float
    connection_bytes: float

    @property
    def needs(self) -> HeldBytes:
        """Bytes and connections of the ranks that have most, rounded to integers."""
        return HeldBytes(round(self.peak_bytes), round(self.connections), round(self.connection_bytes))

    def grown(self, larger: Figures, times: float) -> Figures:
        """Return the figures on the line from here through `larger`, so many times as far."""
        mine, other = vars(self), vars(larger)
        return Figures(**{name: max(0.0, mine[name] + (other[name] - mine[name]) * times) for name in mine})

    def and_then(self, after: Figures) -> Figures:
        """Return figures of both passes, one after the other; memory is the larger's, connections are of both."""
        mine, other = vars(self), vars(after)
        added = {name: mine[name] + other[name] for name in mine}
        return Figures(**{**added, **{name: max(mine[name], other[name]) for name in HELD}})


def tiles_of_host(scheme: Scheme, ranks: int, unit: int) -> int:
    """Return how many tiles the ranks of one host compute."""
    return unit * ranks * scheme.head_groups * scheme.q_pieces * scheme.kv_pieces


class FoldedWorld:
    """A schedule folded on so many hosts, with as many tokens a rank as in the whole."""

    def __init__(self, name: str, setting: Setting, share: float, hosts: int, unit: int) -> None:
        net, whole = setting.interconnect, setting.workload
        self.setting = setting
        self.ranks, self.unit, self.messages = hosts * unit, unit, setting.machine.messages
        q_length, kv_length = (-(-n // net.world_size) * self.ranks for n in (whole.q_length, whole.kv_length))
        self.size = replace(whole, q_length=q_length, kv_length=kv_length)
        self.net = FoldedNet(Interconnect(net.name, net.fabrics[:hosts], net.places[: self.ranks], net.notes))
        self.rates = _masked(setting.machine.rates, share)
        try:
            scheme = parse(name).make(self.ranks)
        except ConfigurationError:
            raise ConfigurationError(f"schedule {name!r} is not the same on fewer hosts: too large") from None
        if (tiles := tiles_of_host(scheme, self.ranks, unit)) > TOO_MANY_TILES:
            raise ConfigurationError(f"schedule {name!r} has {tiles:,} tiles on each host: too large to be planned")
        self.symmetry = symmetry_of(scheme, self.ranks, unit)
        self.schedule = folded(scheme, self.size.q_length, self.size.kv_length, self.symmetry)
        self._known: dict[Pass, Figures] = {}
        self._needs: dict[Pass, HeldBytes] = {}
        self._lowered: dict[Pass, dict[int, Program]] = {each: {} for each in setting.passes}  # until simulated
        self._costs: dict[Pass, dict[int, list[Operation]]] = {each: {} for each in setting.passes}  # the same
        self._chained: dict[Pass, float] = {}
        self._wires: dict[Pass, float] = {}
        self._kernels: dict[Pass, float] = {}

    def one_pass(self, direction: Pass, most_seconds: float = math.inf) -> Figures:
        """Return the figures of a pass. Raises TakesLonger where it is known that it does."""
        if direction not in self._known:
            if self.least_seconds(direction) > most_seconds:
                raise TakesLonger
            self._known[direction] = self._one_pass(direction, most_seconds)
        return self._known[direction]

    def chained_seconds(self, direction: Pass) -> float:
        """Return how long rank 0 takes in a pass with what it waits for, were all others always ready: no less."""
        if direction not in self._chained:
            self._chained[direction] = self._chain(direction, [0], whole=False)
        return self._chained[direction]

    def _chain(self, direction: Pass, ranks: Iterable[int], whole: bool) -> float:
        programs = {rank: self._operations(direction, rank) for rank in ranks}
        return chained_seconds(programs, self.net, self.messages, self.symmetry.canonical, whole=whole)

    def wire_seconds(self, direction: Pass) -> float:
        """Return how long the busiest wire needs for what a pass puts on it: no pass takes less."""
        if direction not in self._wires:
            loads: dict[str, int] = defaultdict(int)
            for (src, dst), nbytes in link_bytes(self.schedule, self.size, direction).items():
                if self.symmetry.here(src):  # what comes in is what goes out of other hosts
                    for wire in self.net.way(src, dst):
                        loads[wire] += nbytes
            self._wires[direction] = max((load / self.net.gbs(wire) / 1e9 for wire, load in loads.items()), default=0.0)
        return self._wires[direction]

    def kernel_seconds(self, direction: Pass) -> float:
        """Return how long the kernels of rank 0 take in a pass."""
        if direction not in self._kernels:
            costs = Costs(self.schedule, self.size, direction, self.rates)
            self._kernels[direction] = kernels_of_rank(storage_of(self.schedule), 0, anything, costs)
        return self._kernels[direction]

    def least_seconds(self, direction: Pass) -> float:
        """Return how long a pass takes at least: its busiest wire, or rank 0 with what it waits for."""
        return max(self.wire_seconds(direction), self.chained_seconds(direction))

    def needs(self, direction: Pass) -> HeldBytes:
        """Return the memory and connections of the rank of host 0 that needs most in one pass."""
        if direction not in self._needs:
            schedule, size = self.schedule, self.size
            programs = self._programs(direction)
            pools = [program_bytes(schedule, size, each) + kept_bytes(schedule, size, each) for each in programs]
            # Without collectives: an exchange is more than one host shows.
            used = Contacts(frozenset(links(schedule, self.setting.passes)))
            self._needs[direction] = held(used, self.setting.target, pools)
        return self._needs[direction]

    def _programs(self, direction: Pass) -> list[Program]:
        return [self._program(direction, rank) for rank in range(self.unit)]

    def _program(self, direction: Pass, rank: int) -> Program:
        known = self._lowered[direction]
        if rank not in known:
            target = Target(early_receives=self.setting.early_receives)
            known[rank] = lower(self.schedule, rank, direction, self.size, target)
        return known[rank]

    def _operations(self, direction: Pass, rank: int) -> list[Operation]:
        known = self._costs[direction]
        if rank not in known:
            known[rank] = operations(self.schedule, self.size, self._program(direction, rank), self.rates)
        return known[rank]

    def _one_pass(self, direction: Pass, most_seconds: float) -> Figures:
        if self._chain(direction, range(self.unit), whole=True) > most_seconds:
            raise TakesLonger
        needs = self.needs(direction)
        costs = [self._operations(direction, rank) for rank in range(self.unit)]
        self._lowered[direction], self._costs[direction] = {}, {}
        compute = max(map(kernel_seconds_of, costs))
        outcome = simulate(
            self.net, costs, self.messages, canonical=self.symmetry.canonical, sharing_seconds=WINDOW_SHARE * compute,
            most_seconds=most_seconds,
        )  # fmt: skip
        loads = outcome.wire_bytes
        slowest = max(loads, key=lambda wire: (loads[wire] / self.net.gbs(wire), wire), default=None)
        wire_bytes = 0.0 if slowest is None else loads[slowest]
        wire_seconds = 0.0 if slowest is None else wire_bytes / (self.net.gbs(slowest) * 1e9)
        return Figures(outcome.seconds, compute, outcome.exposed_seconds, wire_bytes, wire_seconds, *needs)


def _masked(rates: Rates, share: float) -> Rates:
    """Return rates at which a whole tile takes the time of the share of it that is visible."""
    share = max(share, LEAST_SHARE)
    forward, backward = (tuple((side, rate / share) for side, rate in each) for each in (rates.forward, rates.backward))
    return replace(rates, forward=forward, backward=backward)
