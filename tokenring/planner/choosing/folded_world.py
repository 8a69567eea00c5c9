"""One of many equal hosts, which stands for all: what a schedule costs there, pass by pass."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import Pass
from tokenring.lowering.calls import anything
from tokenring.lowering.footprint import HeldBytes, held, kept_bytes, program_bytes
from tokenring.lowering.lower import agenda_of, lower_agenda
from tokenring.lowering.program import Program
from tokenring.lowering.storage import Storage
from tokenring.lowering.target import Contacts, Target, links
from tokenring.planner.choosing.folding import Folding
from tokenring.planner.choosing.select import ROUNDING
from tokenring.planner.choosing.symmetry import FoldedNet, symmetry_of
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.interconnects.rank_order import good_order
from tokenring.planner.simulation.chained import chained_seconds
from tokenring.planner.simulation.operations import Costs, Operation, alone_seconds
from tokenring.planner.simulation.predict import WINDOW_SHARE, Setting, kernel_seconds_of, kernels_of_rank
from tokenring.planner.simulation.simulate import TakesLonger, simulate
from tokenring.schedule.families.registry import parse
from tokenring.schedule.scheme import Scheme
from tokenring.tables.rates import Rates

TOO_MANY_TILES = 40_000  # of one host: a schedule with more is not looked at
LEAST_SHARE = 1e-12  # of pairs that are visible, where none is
# How deep a bound looks: into the kernels of rank 0, into all that it does, or also into what it waits for.
DEPTHS = KERNELS, ALONE, CHAINED = range(3)
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


NO_TIME = Figures(*[0.0] * len(fields(Figures)))


def tiles_of_host(scheme: Scheme, ranks: int, unit: int) -> int:
    """Return how many tiles the ranks of one host compute."""
    return unit * ranks * scheme.head_groups * scheme.q_pieces * scheme.kv_pieces


class FoldedWorld:
    """A schedule folded on so many hosts, with as many tokens a rank as in the whole.

    net: of these hosts, where it is known from another schedule.
    """

    def __init__(
        self, name: str, setting: Setting, share: float, hosts: int, unit: int, net: FoldedNet | None = None
    ) -> None:
        whole, ranks = setting.workload, hosts * unit
        self.setting, self.ranks, self.unit, self.messages = setting, ranks, unit, setting.machine.messages
        of_all = setting.interconnect.world_size
        q_length, kv_length = (-(-n // of_all) * ranks for n in (whole.q_length, whole.kv_length))
        self.size = replace(whole, q_length=q_length, kv_length=kv_length)
        self.net = folded_net(setting.interconnect, hosts, unit) if net is None else net
        self.rates = _masked(setting.machine.rates, share)
        try:
            scheme = parse(name).make(self.ranks)
        except ConfigurationError:
            raise ConfigurationError(f"schedule {name!r} is not the same on fewer hosts: too large") from None
        if (tiles := tiles_of_host(scheme, self.ranks, unit)) > TOO_MANY_TILES:
            raise ConfigurationError(f"schedule {name!r} has {tiles:,} tiles on each host: too large to be planned")
        self.scheme, self.symmetry = scheme, symmetry_of(scheme, self.ranks, unit)
        self._folding: Folding | None = None
        self._storages: dict[int | None, Storage] = {}  # of host 0, and of one rank's moves
        self._known: dict[Pass, Figures] = {}
        self._needs: dict[Pass, HeldBytes] = {}
        self._programs: dict[tuple[Pass, int], Program] = {}  # until simulated
        self._costs: dict[tuple[Pass, int], list[Operation]] = {}  # the same
        self._bounds: dict[tuple[str, Pass], float] = {}

    # ---------- bounds

    def least_seconds(self, direction: Pass, depth: int = CHAINED) -> float:
        """Return how long a pass takes at least: its busiest wire, or what rank 0 does (see DEPTHS)."""
        wire = self._bound(self.wire_seconds, direction)
        looks = (self.kernel_seconds, self.alone_seconds, self.chained_seconds)
        return max(wire, *(self._bound(look, direction) for look in looks[min(depth, 1) : depth + 1]))

    def _bound(self, look: Callable[[Pass], float], direction: Pass) -> float:
        key = look.__name__, direction
        if key not in self._bounds:
            self._bounds[key] = look(direction)
        return self._bounds[key]

    def wire_seconds(self, direction: Pass) -> float:
        """Return how long the busiest wire needs for what a pass puts on it: no pass takes less."""
        loads: dict[str, int] = defaultdict(int)
        # What comes in is what goes out of other hosts.
        for (src, dst), nbytes in self.folding.link_bytes(self.size, direction).items():
            for wire in self.net.way(src, dst):
                loads[wire] += nbytes
        return max((load / self.net.gbs(wire) / 1e9 for wire, load in loads.items()), default=0.0)

    def kernel_seconds(self, direction: Pass) -> float:
        """Return how long the kernels of rank 0 take in a pass."""
        return kernels_of_rank(self._storage(0), 0, anything, self._prices(direction))

    def alone_seconds(self, direction: Pass) -> float:
        """Return how long rank 0 takes in a pass if it waits for nothing."""
        return alone_seconds(self._operations(direction, 0), self.messages.post_seconds)

    def chained_seconds(self, direction: Pass) -> float:
        """Return how long rank 0 takes in a pass with what it waits for, were all others always ready: no less."""
        return self._chain({0: self._operations(direction, 0)}, whole=False)

    def _chain(self, programs: Mapping[int, Sequence[Operation]], whole: bool) -> float:
        return chained_seconds(programs, self.net, self.messages, self.symmetry.canonical, whole=whole)

    # ---------- figures

    def one_pass(self, direction: Pass, most_seconds: float = math.inf) -> Figures:
        """Return the figures of a pass. Raises TakesLonger where it is known that it does."""
        if direction not in self._known:
            if any(self.least_seconds(direction, depth) > most_seconds for depth in DEPTHS if most_seconds < math.inf):
                raise TakesLonger
            self._known[direction] = self._one_pass(direction, most_seconds)
        return self._known[direction]

    def holds(self, direction: Pass) -> Figures:
        """Return what `one_pass` says of memory and connections, and no time: nothing is simulated."""
        return replace(NO_TIME, **self.needs(direction)._asdict())

    def needs(self, direction: Pass) -> HeldBytes:
        """Return the memory and connections of the rank of host 0 that needs most in one pass."""
        if direction not in self._needs:
            schedule, size = self._storage().schedule, self.size
            programs = [self._program(direction, rank) for rank in range(self.unit)]
            pools = [program_bytes(schedule, size, each) + kept_bytes(schedule, size, each) for each in programs]
            # Without collectives: an exchange is more than one host shows.
            used = Contacts(frozenset(links(schedule, self.setting.passes)))
            self._needs[direction] = held(used, self.setting.target, pools)
        return self._needs[direction]

    def _one_pass(self, direction: Pass, most_seconds: float) -> Figures:
        costs = [self._operations(direction, rank) for rank in range(self.unit)]
        if most_seconds < math.inf and self._chain(dict(enumerate(costs)), whole=True) > most_seconds:
            raise TakesLonger
        needs = self.needs(direction)
        for rank in range(self.unit):
            del self._programs[direction, rank], self._costs[direction, rank]
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

    # ---------- what host 0 does

    @property
    def folding(self) -> Folding:
        """The tiles and routes of host 0, found when they are first asked for."""
        if self._folding is None:
            self._folding = Folding(self.scheme, self.size.q_length, self.size.kv_length, self.symmetry)
        return self._folding

    def _storage(self, rank: int | None = None) -> Storage:
        """Return the storage of the schedule of host 0, or of what the program of one rank follows from."""
        if rank not in self._storages:
            self._storages[rank] = Storage(self.folding.schedule(rank))
        return self._storages[rank]

    def _program(self, direction: Pass, rank: int) -> Program:
        known = self._programs.get((direction, rank))
        if known is None:
            storage = self._storage(0 if rank == 0 else None)
            agenda = agenda_of(storage, rank, direction, self.size)
            known = lower_agenda(agenda, self.size, Target(early_receives=self.setting.early_receives))
            self._programs[direction, rank] = known
        return known

    def _operations(self, direction: Pass, rank: int) -> list[Operation]:
        if (direction, rank) not in self._costs:
            self._costs[direction, rank] = self._prices(direction).operations(self._program(direction, rank))
        return self._costs[direction, rank]

    def _prices(self, direction: Pass) -> Costs:
        return Costs(self.folding.frame, self.size, direction, self.rates)


class DrawnOut:
    """A schedule folded on a few hosts and on twice as many: on all hosts its figures lie on the line through both.

    times: how far all hosts are from the few, in steps of the few.
    """

    def __init__(self, few: FoldedWorld, twice: FoldedWorld, times: float) -> None:
        self.few, self.twice, self.times = few, twice, times

    def least_seconds(self, direction: Pass, depth: int = CHAINED) -> float:
        """Return how long a pass takes at least: what the few take exactly, and twice as many at least.

        Nothing is known (0) before the few are simulated, which is at depth 1.
        """
        if depth == 0:
            return 0.0
        seconds = self.few.one_pass(direction).seconds
        return max(0.0, seconds + (self.twice.least_seconds(direction, depth) - seconds) * self.times)

    def one_pass(self, direction: Pass, most_seconds: float = math.inf) -> Figures:
        """Return the figures of a pass. Raises TakesLonger where it is known that it does."""
        few = self.few.one_pass(direction)
        most_of_twice = few.seconds + (most_seconds - few.seconds) / self.times
        return few.grown(self.twice.one_pass(direction, most_of_twice * ROUNDING), self.times)

    def holds(self, direction: Pass) -> Figures:
        """Return what `one_pass` says of memory and connections, and no time: nothing is simulated."""
        return self.few.holds(direction).grown(self.twice.holds(direction), self.times)


def folded_net(net: Interconnect, hosts: int, unit: int) -> FoldedNet:
    """Return the wires of so many of the hosts, of which one stands for all.

    Ranks stand where a schedule is made to have them: in a good order inside of each host.
    """
    few = Interconnect(net.name, net.fabrics[:hosts], net.places[: hosts * unit], net.notes)
    places = tuple(few.places[rank] for rank in good_order(few))
    return FoldedNet(Interconnect(net.name, few.fabrics, places, net.notes))


def _masked(rates: Rates, share: float) -> Rates:
    """Return rates at which a whole tile takes the time of the share of it that is visible."""
    share = max(share, LEAST_SHARE)
    forward, backward = (tuple((side, rate / share) for side, rate in each) for each in (rates.forward, rates.backward))
    return replace(rates, forward=forward, backward=backward)
