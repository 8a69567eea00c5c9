"""A shape as wires and the ways through them: its prediction, and its facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from tokenring.topology.measure.lab import Flow, Lab, Race
from tokenring.topology.measure.survey import Tables, totals
from tokenring.topology.model.facts import (
    PROCESS,
    Device,
    DeviceKind,
    Facts,
    Link,
    Measurement,
    Note,
    SourceOrigin,
    pairs,
)
from tokenring.topology.model.sanity import sound

FORMAT = "measured"
TOLERANCE = 1.25  # of the check round
NOTED_SPREAD = 0.15


@dataclass(frozen=True)
class Wire:
    """A link, a port or an uplink.

    gbs: one way. both_gbs: both ways at once, in all. A port that is never the narrowest part of a way has no
    figures.
    """

    a: str
    b: str
    kind: str
    gbs: float | None = None
    both_gbs: float | None = None

    @property
    def half_duplex(self) -> bool:
        """True if both ways at once carry about what one way does."""
        return Measurement(self.a, self.b, self.gbs, self.both_gbs).is_half_duplex


@dataclass
class Model:
    """A shape with its evidence. `ways`: the nodes that each flow passes; empty where no shape was found."""

    ranks: int
    wires: list[Wire] = field(default_factory=list)
    ways: Mapping[Flow, tuple[str, ...]] = field(default_factory=dict)
    nodes: dict[str, DeviceKind] = field(default_factory=dict)  # beside the ranks
    evidence: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def seconds(self, nbytes: Mapping[Flow, float]) -> float:
        """Return the seconds that the busiest wire needs for the bytes of these flows."""
        wires = {(wire.a, wire.b): wire for wire in self.wires}
        load: dict[tuple[str, str], float] = {}
        for flow, size in nbytes.items():
            way = self.ways[flow]
            for hop in pairwise(way):
                wire = wires.get(hop) or wires[hop[::-1]]
                if wire.gbs is not None:
                    key = (wire.a, wire.b) if wire.half_duplex else hop
                    load[key] = load.get(key, 0.0) + size / 1e9 / wire.gbs
        return max(load.values(), default=0.0)


def name(rank: int) -> str:
    """Return the name of a rank's device."""
    return f"rank{rank}"


def process(rank: int) -> Device:
    """Return the device of a rank, which measures between its CPU memory and that of others."""
    return Device(name(rank), "accelerator", index=rank, model=PROCESS)


def check(model: Model, lab: Lab) -> None:
    """Run one more race, of flows that were not raced together before; a result that differs is a doubt.

    A race counts as predicted if it takes between 1/TOLERANCE and TOLERANCE of the predicted time.
    """
    if not model.ways or model.ranks < 3:
        return
    steps = sorted({1, model.ranks // 2})
    flows = tuple((rank, (rank + step) % model.ranks) for step in steps for rank in range(model.ranks))
    (outcome,) = totals(lab, [Race(flows, total=True)], "the check")
    wanted = model.seconds(outcome.nbytes)
    ratio = outcome.seconds / wanted if wanted > 0 else 0.0
    good = 1 / TOLERANCE <= ratio <= TOLERANCE
    text = f"{len(flows)} flows at once took {ratio:.2f} of the time that this predicts"
    (model.evidence if good else model.doubts).append(text)


def facts(model: Model, tables: Tables) -> Facts:
    """Return the model and the tables as a source of facts."""
    everyone = range(model.ranks)
    devices = [process(rank) for rank in everyone]
    devices += [Device(node, kind, name=node) for node, kind in model.nodes.items()]
    links = [Link(wire.a, wire.b, wire.kind) for wire in model.wires]
    close = {frozenset((wire.a, wire.b)) for wire in model.wires} | _behind_one_switch(model)
    for a, b in pairs(map(name, everyone)):
        if frozenset((a, b)) not in close:
            links.append(Link(a, b, "path"))
    measured = [_pair(flow, tables) for flow in sorted(tables.alone)]
    measured += [
        Measurement(wire.a, wire.b, wire.gbs, wire.both_gbs, what="shared")
        for wire in model.wires
        if wire.gbs is not None and not {wire.a, wire.b} <= set(map(name, everyone))
    ]
    found = Facts(
        "links", tuple(devices), tuple(links), tuple(measured), tuple(_notes(model, tables)), SourceOrigin(FORMAT)
    )
    return sound(found)


def _behind_one_switch(model: Model) -> set[frozenset[str]]:
    ports: dict[str, list[str]] = {}
    for wire in model.wires:
        if model.nodes.get(wire.b) == "switch" and wire.kind == "link":
            ports.setdefault(wire.b, []).append(wire.a)
    return {frozenset(pair) for attached in ports.values() for pair in pairs(attached)}


def _pair(flow: Flow, tables: Tables) -> Measurement:
    a, b = flow
    both = tables.both.get(flow), tables.both.get((b, a))
    total = both[0] + both[1] if both[0] is not None and both[1] is not None else None
    latency = tables.latency_us.get((min(flow), max(flow)))
    spread = round(tables.spread.get(flow, 0.0), 4)
    gbs = _short(tables.alone[flow])
    return Measurement(name(a), name(b), gbs, _short(total), _short(latency), "alone", spread)


def _short(value: float | None) -> float | None:
    """Round to four digits: more were not measured."""
    return None if value is None else float(f"{value:.4g}")


def _notes(model: Model, tables: Tables) -> Iterable[Note]:
    yield from (Note(text, role="evidence") for text in model.evidence)
    yield from (Note(text, role="doubt") for text in model.doubts)
    worst = max(tables.spread, key=tables.spread.__getitem__, default=None)
    if worst is not None and tables.spread[worst] > NOTED_SPREAD:
        text = f"{name(worst[0])} to {name(worst[1])} was measured with a spread of {tables.spread[worst]:.0%}"
        yield Note(f"{text}: something else was at work")
    if tables.guessed:
        yield Note(f"{tables.guessed} of {len(tables.alone)} flows could not be measured alone in the time")
