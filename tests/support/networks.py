"""Networks of which all is known, on which flows share what they pass max-min-fairly: for what measuring infers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tokenring.topology.measure.colours import rounds
from tokenring.topology.measure.lab import SHORT, Flow, Race, TransferOutcome, both_ways

Part = str  # a direction of a link, or a half-duplex link


@dataclass
class Network:
    """`ways`: the parts that a flow passes; `gbs`: of each part."""

    ranks: int
    ways: dict[Flow, tuple[Part, ...]] = field(default_factory=dict)
    gbs: dict[Part, float] = field(default_factory=dict)

    def rates(self, flows: Iterable[Flow]) -> dict[Flow, float]:
        """Max-min fair: the part that has least for each of its flows decides for them, and so on."""
        left, room, found = list(flows), dict(self.gbs), {}
        while left:
            users: dict[Part, list[Flow]] = {}
            for flow in left:
                for part in self.ways[flow]:
                    users.setdefault(part, []).append(flow)
            tight = min(users, key=lambda part: room[part] / len(users[part]))
            rate = room[tight] / len(users[tight])
            for flow in users[tight]:
                found[flow] = rate
                left.remove(flow)
                for part in self.ways[flow]:
                    room[part] -= rate
        return found

    def seconds(self, nbytes: Mapping[Flow, float]) -> float:
        """Until the last has arrived: who is done leaves its share to the others."""
        left, passed = dict(nbytes), 0.0
        while left:
            rates = self.rates(left)
            step = min(left[flow] / rates[flow] / 1e9 for flow in left)
            passed += step
            left = {f: size - rates[f] * step * 1e9 for f, size in left.items()}
            left = {f: size for f, size in left.items() if size > 1}
        return passed

    def renamed(self, order: Sequence[int]) -> Network:
        """The same where rank r is called order[r]."""
        ways = {(order[a], order[b]): way for (a, b), way in self.ways.items()}
        return Network(self.ranks, ways, self.gbs)


def mesh(ranks: int, link: float) -> Network:
    net = Network(ranks)
    for a in range(ranks):
        for b in range(ranks):
            if a != b:
                net.ways[a, b] = (f"{a}-{b}",)
                net.gbs[f"{a}-{b}"] = link
    return net


def switch(ranks: int, port: float, half: bool = False) -> Network:
    net = Network(ranks)
    for a in range(ranks):
        net.gbs |= {f"{a} out": port, f"{a} in": port}
        for b in range(ranks):
            if a != b:
                net.ways[a, b] = (f"{a}", f"{b}") if half else (f"{a} out", f"{b} in")
        net.gbs[f"{a}"] = port
    return net


def ring(ranks: int, link: float) -> Network:
    """The shorter way round; to the opposite rank, even ranks forwards and odd ones back."""
    net = Network(ranks)
    for a in range(ranks):
        net.gbs |= {f"{a} on": link, f"{a} back": link}
        for b in range(ranks):
            ahead = (b - a) % ranks
            if 2 * ahead < ranks or (2 * ahead == ranks and a % 2 == 0):
                net.ways[a, b] = tuple(f"{(a + hop) % ranks} on" for hop in range(ahead))
            else:
                net.ways[a, b] = tuple(f"{(a - hop) % ranks} back" for hop in range(ranks - ahead))
    del net.ways[0, 0]
    for a in range(1, ranks):
        del net.ways[a, a]
    return net


def islands(sizes: Sequence[int], link: float, uplink: float, *, inside: str, half: bool = False) -> Network:
    """Groups, each a mesh (with another port that leads out) or a switch; two share one uplink, more meet in a root."""
    net = Network(sum(sizes))
    group_of = [number for number, size in enumerate(sizes) for _ in range(size)]
    for number in range(len(sizes)):
        net.gbs |= {f"up{number} out": uplink, f"up{number} in": uplink, f"up{number}": uplink}
    for a, one in enumerate(group_of):
        net.gbs |= {f"{a} out": link, f"{a} in": link}
        for b, other in enumerate(group_of):
            if a == b:
                continue
            net.gbs[f"{a}-{b}"] = link
            ends = (f"{a} out", f"{b} in")
            if one == other:
                net.ways[a, b] = ends if inside == "switch" else (f"{a}-{b}",)
            elif half:
                net.ways[a, b] = (ends[0], f"up{one}", *([f"up{other}"] if len(sizes) > 2 else []), ends[1])
                if len(sizes) == 2:
                    net.ways[a, b] = (ends[0], "up0", ends[1])
            else:
                net.ways[a, b] = (ends[0], f"up{one} out", f"up{other} in", ends[1])
    return net


def bus(ranks: int, gbs: float) -> Network:
    """All share one path."""
    net = Network(ranks, gbs={"bus": gbs})
    net.ways = {(a, b): ("bus",) for a in range(ranks) for b in range(ranks) if a != b}
    return net


class NetworkLab:
    """A lab on such a network; `noise` spoils what it finds by up to that share."""

    elapsed, limit_seconds, hurried = 0.0, 60.0, False

    def __init__(self, network: Network, noise: float = 0.0) -> None:
        self.network, self.ranks, self._noise = network, network.ranks, noise
        self._random = random.Random(1)
        self.link_seconds = 0.06
        self.races = 0
        self._known: dict[Flow, float] = {}

    def learn(self, gbs: Mapping[Flow, float]) -> None:
        self._known.update(gbs)

    def latencies(self) -> dict[Flow, float]:
        return {pair: 50.0 for each in rounds(self.ranks) for pair in each}

    def estimate(self) -> dict[Flow, float]:
        found = {flow: gbs for each in rounds(self.ranks) for flow, gbs in self._rates(both_ways(each)).items()}
        self.learn(found)
        return found

    def race(self, races: Sequence[Race], what: str) -> list[TransferOutcome]:
        self.races += len(races)
        return [self._outcome(each) for each in races]

    def _outcome(self, race: Race) -> TransferOutcome:
        if not race.total:
            return TransferOutcome(self._rates(race.flows))
        nbytes = {flow: self._known[flow] * 1e9 * 0.04 for flow in race.flows}
        seconds = self.network.seconds(nbytes) * self._spoilt()
        short = seconds * SHORT / (1 - SHORT)
        return TransferOutcome(self._rates(race.flows), 0.001 + short + seconds, 0.001 + short, nbytes)

    def _rates(self, flows: Iterable[Flow]) -> dict[Flow, float]:
        return {flow: rate * self._spoilt() for flow, rate in self.network.rates(flows).items()}

    def _spoilt(self) -> float:
        return 1 + self._random.uniform(-self._noise, self._noise)
