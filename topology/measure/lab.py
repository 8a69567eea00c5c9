"""Transfers between ranks, some at once, timed where they arrive."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from tokenring.backends.interfaces import Transport, Work
from tokenring.ir.schedule_data import REQUESTS
from tokenring.runtime.pool import Pool
from tokenring.topology.measure.colours import rounds

Flow = tuple[int, int]  # from, to
Tell = Callable[[int, int, str], None]

LINK_SECONDS = 0.06  # that count of a transfer that has its link alone; a third more goes before
LEAST_LINK_SECONDS = 0.005
START_UP = 1.1  # a whole transfer takes no more than this share of time for it
SHORT = 0.3  # of that, in the shorter transfer of a race for the total
ESTIMATE_BYTES = (1 << 15, 1 << 18, 1 << 21, 1 << 24, 1 << 26)
MOST_BYTES = ESTIMATE_BYTES[-1]  # of one transfer
ENOUGH_SECONDS = 0.008  # for a first estimate
PINGS = 5


class OutOfTime(Exception):
    """The time is up: no more transfers."""


@dataclass(frozen=True)
class Race:
    """Flows that run at once. `total`: also what all carry together, which takes a second, shorter transfer.

    share: of the usual size; where many flows have one end, they take long enough together.
    """

    flows: tuple[Flow, ...]
    total: bool = False
    share: float = 1.0


@dataclass(frozen=True)
class TransferOutcome:
    """GB/s of each flow once under way: of use if it alone goes to its rank, else the ends cannot be distinguished.

    Of a race for the total: the seconds of a long and of a short one, and by how many bytes they differ, so
    that start-up cancels.
    """

    gbs: Mapping[Flow, float]
    long_seconds: float = 0.0
    short_seconds: float = 0.0
    nbytes: Mapping[Flow, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The seconds that the bytes that differ take. If the short race was disturbed, the long one bounds it."""
        bound = (1 - SHORT) * self.long_seconds / START_UP
        return max(self.long_seconds - self.short_seconds, bound, 1e-9)

    @property
    def total(self) -> float:
        """The GB/s of all flows together."""
        return sum(self.nbytes.values()) / self.seconds / 1e9

    def least(self, other: TransferOutcome) -> TransferOutcome:
        """Return the shorter times of two runs: what disturbs takes time, and never gives any."""
        long, short = min(self.long_seconds, other.long_seconds), min(self.short_seconds, other.short_seconds)
        return replace(self, long_seconds=long, short_seconds=short)


class Lab(Protocol):
    """A place where flows are raced."""

    ranks: int

    @property
    def hurried(self) -> bool:
        """True once more than half of the time has passed: nothing is done again."""

    def race(self, races: Sequence[Race], what: str) -> list[TransferOutcome]:
        """Run the races; return the outcomes, equal on all ranks, which all call it. Raises OutOfTime."""


class TransportLab:
    """A lab that races over a transport. All ranks make the same calls."""

    def __init__(self, transport: Transport, seconds: float, tell: Tell = lambda done, steps, what: None) -> None:
        self.transport, self.ranks, self.rank = transport, transport.world_size, transport.rank
        self.limit_seconds, self._tell = seconds, tell
        self.elapsed = 0.0  # on rank 0, as of the last exchange: all ranks count by that
        self._began = time.perf_counter()
        self._known: dict[Flow, float] = {}  # GB/s, to choose sizes by
        self._pool = Pool.of(transport, torch.device("cpu"))
        self._sent = torch.zeros(0, dtype=torch.uint8)
        self.link_seconds = LINK_SECONDS

    @property
    def hurried(self) -> bool:
        """True once more than half of the time has passed; see Lab.hurried."""
        return self.elapsed > self.limit_seconds / 2

    def learn(self, gbs: Mapping[Flow, float]) -> None:
        """Keep the GB/s that flows are known to reach alone, to choose the sizes of transfers by."""
        self._known.update(gbs)

    def estimate(self) -> dict[Flow, float]:
        """Estimate the GB/s of every flow to within a factor of the ranks or so.

        Sizes grow until they take some time. Raises OutOfTime.
        """
        found: dict[Flow, float] = {}
        for nbytes in ESTIMATE_BYTES:
            left = [[flow for flow in both_ways(each) if flow not in found] for each in rounds(self.ranks)]
            plans = [{flow: (nbytes, nbytes) for flow in flows} for flows in left if flows]
            self._check_time("a first estimate")
            for times in self._run(plans) if plans else ():
                for flow, (first, second) in times.items():
                    if second - first >= ENOUGH_SECONDS or nbytes == MOST_BYTES:
                        found[flow] = nbytes / max(second - first, 1e-9) / 1e9
        self.learn(found)
        return found

    def race(self, races: Sequence[Race], what: str) -> list[TransferOutcome]:
        """Run the races; see Lab.race. Raises OutOfTime."""
        self._check_time(what)
        plans = []
        for each in races:
            plans.append({flow: self._sizes(flow, each.share) for flow in each.flows})
            if each.total:
                plans.append({flow: self._sizes(flow, each.share * SHORT) for flow in each.flows})
        run = iter(self._run(plans))
        sizes = iter(plans)
        outcomes = []
        for each in races:
            times, plan = next(run), next(sizes)
            gbs = {flow: _rate(*plan[flow], *times[flow]) for flow in each.flows}
            if each.total:
                short, short_plan = next(run), next(sizes)
                more = {flow: float(sum(plan[flow]) - sum(short_plan[flow])) for flow in each.flows}
                outcomes.append(TransferOutcome(gbs, last(times), last(short), more))
            else:
                outcomes.append(TransferOutcome(gbs))
        return outcomes

    def latencies(self) -> dict[Flow, float]:
        """Measure the microseconds one way of each pair: half of the fastest of some round trips."""
        mine: list[float] = []
        pairs = [pair for each in rounds(self.ranks) for pair in each]
        small = self._memory(8)[:8]
        for each in rounds(self.ranks):
            self.transport.exchange(b"", "round trips")
            for a, b in each:
                if self.rank in (a, b):
                    trips = [self._trip(b if self.rank == a else a, self.rank == a, small) for _ in range(PINGS)]
                    if self.rank == a:
                        mine.append(min(trips))
        heard = [iter(each) for each in self._gather(mine)]
        return {(a, b): next(heard[a]) * 5e5 for a, b in pairs}

    def _trip(self, peer: int, first: bool, small: torch.Tensor) -> float:
        transport = self.transport
        answer = transport.recv(small, peer, REQUESTS, "round trip")
        began = time.perf_counter()
        if first:
            sent = transport.send(self._sent[:8], peer, REQUESTS, "round trip")
            answer.wait()
        else:
            answer.wait()
            sent = transport.send(self._sent[:8], peer, REQUESTS, "round trip")
        took = time.perf_counter() - began
        sent.wait()
        return took

    # ---------- transfers

    def _sizes(self, flow: Flow, share: float) -> tuple[int, int]:
        """Return the bytes that go before, and the bytes that count."""
        usual = min(self._known.get(flow, 0.0) * 1e9 * self.link_seconds, float(MOST_BYTES))
        counted = max(usual * share, 4096.0)
        return max(1, round(counted / 3)), round(counted)

    def _run(self, plans: Sequence[Mapping[Flow, tuple[int, int]]]) -> list[dict[Flow, tuple[float, float]]]:
        """Run the plans; return on all ranks the seconds from the start until each flow's two parts have come."""
        memory = self._memory(max(max(sizes) for plan in plans for sizes in plan.values()))
        mine: list[float] = []
        for plan in plans:
            for times in self._transfer(plan, memory):
                mine += times
        heard = [iter(each) for each in self._gather(mine)]
        return [{(a, b): (next(heard[b]), next(heard[b])) for a, b in plan} for plan in plans]

    def _transfer(self, plan: Mapping[Flow, tuple[int, int]], memory: torch.Tensor) -> Iterable[tuple[float, float]]:
        """Run one race on this rank; return the seconds of the flows that come here.

        All flows carry nothing but zeros, so that receives may share memory.
        """
        transport = self.transport
        into = [(flow, sizes) for flow, sizes in plan.items() if flow[1] == self.rank]
        coming: list[tuple[Work, Work]] = []
        for (source, _), (before, counted) in into:
            first = transport.recv(memory[:before], source, REQUESTS, "measuring")
            coming.append((first, transport.recv(memory[:counted], source, REQUESTS, "measuring")))
        transport.exchange(b"", "the start of a transfer")
        began = time.perf_counter()
        sent = [
            transport.send(self._sent[:size], target, REQUESTS, "measuring")
            for (source, target), sizes in plan.items()
            if source == self.rank
            for size in sizes
        ]
        times = []
        for first, second in coming:
            first.wait()
            start = time.perf_counter() - began
            second.wait()
            times.append((start, time.perf_counter() - began))
        for handle in sent:
            handle.wait()
        return times

    def _memory(self, nbytes: int) -> torch.Tensor:
        """Return memory of `nbytes` bytes to receive into; all receives share it."""
        self._pool.reserve(nbytes)
        if self._sent.numel() < nbytes:
            self._sent = torch.zeros(nbytes, dtype=torch.uint8)
        return self._pool.data

    def _gather(self, mine: Sequence[float]) -> list[tuple[float, ...]]:
        """Exchange what every rank has timed; take note of the time that has passed on rank 0."""
        values = [time.perf_counter() - self._began, *mine]
        heard = self.transport.exchange_text(struct.pack(f"{len(values)}f", *values), "what was timed")
        numbers = [struct.unpack(f"{len(each) // 4}f", each) for each in heard]
        self.elapsed = numbers[0][0]
        return [each[1:] for each in numbers]

    def _check_time(self, what: str) -> None:
        self._tell(min(round(self.elapsed), round(self.limit_seconds)), max(1, round(self.limit_seconds)), what)
        if self.elapsed >= self.limit_seconds:
            raise OutOfTime(what)


def _rate(before: int, counted: int, start: float, end: float) -> float:
    """Return the GB/s of the bytes that count.

    A rank that was not awake when the first part came has a start that is too late.
    """
    under_way = counted / max(end - start, 1e-9)
    return min(under_way, START_UP * (before + counted) / max(end, 1e-9)) / 1e9


def last(times: Mapping[Flow, tuple[float, float]]) -> float:
    """Return the seconds until the last of the flows has arrived."""
    return max(end for _, end in times.values())


def both_ways(pairs: Iterable[tuple[int, int]]) -> tuple[Flow, ...]:
    """Return the flows of these pairs, in both directions."""
    return tuple(flow for a, b in pairs for flow in ((a, b), (b, a)))
