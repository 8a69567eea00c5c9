"""Facts of one source about a machine, in its own words as far as they go. Unknown is None, never 0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

T = TypeVar("T")
DeviceKind = Literal["accelerator", "package", "nic", "switch", "host-bridge", "pcie-switch", "numa", "cpu", "host"]
Coverage = Literal["links", "pcie", "devices"]
LinkState = Literal["up", "down"]
MAX_DEVICES = 1024  # of one source

# Links of accelerators' own ("link": measured, of what kind is not known), and ways through PCIe from the
# shortest to the longest.
PEER_KINDS = ("nvlink", "xgmi", "hccs", "sio", "ub", "mxlink", "mtlink", "mlulink", "link")
PCIE_PATHS = ("pix", "pxb", "phb", "node", "sys")
PCIE_KINDS = ("pcie", *PCIE_PATHS)  # "pcie": somewhere through PCIe, the source does not say how far
ASSUMED = "assumed"  # the label of a link that no source shows
PROCESS = "CPU process"  # the model of a rank that measured, whose transfers were between CPU memories
HALF_DUPLEX = 1.25  # both ways at once, as a multiple of one way: no more than this
# Accelerator to CPU; between hosts, and what leads there; between switches; measured, through parts that others share.
OTHER_KINDS = ("c2c", "network", "uplink", "path")
LINK_KINDS = (*PEER_KINDS, *PCIE_KINDS, *OTHER_KINDS)


@dataclass(frozen=True)
class Device:
    """A thing with links. `id` is its name inside its source; `parent` the id of what it hangs from (a PCI tree)."""

    id: str
    kind: DeviceKind
    index: int | None = None
    bus_id: str | None = None
    phy_id: int | None = None
    die: int | None = None
    package: str | None = None
    model: str | None = None  # as the source writes it: "NVIDIA H100 80GB HBM3", "910B3"
    arch: str | None = None  # "sm90", "gfx942", "910B", "A3": what decides the links' generation
    vendor: str | None = None  # "nvidia", "amd", "huawei", ...
    name: str | None = None  # "mlx5_0"
    numa_node: int | None = None
    numa_affinity: str | None = None  # where a source gives a list: "0,5-11"
    cpu_affinity: str | None = None  # "0-23,48-71"
    gbs: float | None = None  # of a port, one way
    ports: int | None = None  # links of its own that are up, wherever they lead
    host: str | None = None
    parent: str | None = None


@dataclass(frozen=True)
class Link:
    """A link, or a way through PCIe, between two devices of one source.

    `count` of physical links and `bandwidth_gbs` of all of them together, one way. `switched`: the
    source itself says that it goes through a switch. `label` is the source's own word.
    """

    a: str
    b: str
    kind: str
    count: int | None = None
    bandwidth_gbs: float | None = None
    switched: bool = False
    state: LinkState | None = None
    label: str | None = None


@dataclass(frozen=True)
class Measurement:
    """A measurement from a to b: one way (`gbs`), both ways at once (`both_gbs`), latency."""

    a: str
    b: str
    gbs: float | None = None
    both_gbs: float | None = None
    latency_us: float | None = None
    what: str | None = None  # "peer access off", "copy engine, write"
    spread: float | None = None  # of repeated values, as a share: what else was at work

    @property
    def is_half_duplex(self) -> bool:
        """True if both ways at once carry about what one way does."""
        return self.gbs is not None and self.both_gbs is not None and self.both_gbs <= HALF_DUPLEX * self.gbs


@dataclass(frozen=True)
class Note:
    """A remark on a source: what is missing, what was put right, why there is nothing.

    role: evidence and doubts go into the verdict, and a doubt makes it less sure: what a measurement says for and
    against its own shape, and what a dump lacks that was cut.
    """

    text: str
    line: int | None = None
    column: int | None = None
    role: Literal["remark", "evidence", "doubt"] = "remark"

    def __str__(self) -> str:
        """Return the text, after the line's number where it is known."""
        return self.text if self.line is None else f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class SourceOrigin:
    """The origin of facts: a format, a file, a host."""

    format: str  # the name in the registry: "nvidia-smi topo -m"
    file: str | None = None
    host: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that one source said.

    `coverage` is what the source would have shown: every link between accelerators ("links"); no more than
    the PCIe tree, other links being invisible to it ("pcie"); devices only, links left to others ("devices").
    """

    coverage: Coverage
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[Note, ...] = ()
    origin: SourceOrigin | None = None

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """The devices that are accelerators."""
        return tuple(device for device in self.devices if device.kind == "accelerator")

    def of(self, origin: SourceOrigin) -> Facts:
        """Return the facts with this origin."""
        return replace(self, origin=origin)


def normal_bus_id(text: str) -> str | None:
    """Normalise a bus id; return None for what is none.

    `00000000:1A:00.0` and `1a:00.0` are both `0000:1a:00.0`.
    """
    match = re.fullmatch(
        r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", text.strip().lower(), re.ASCII
    )
    if match is None:
        return None
    domain, bus, slot, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(slot, 16):02x}.{function or '0'}"


def single_number(text: str | None) -> int | None:
    """Return the number that a text is; None for lists, for N/A and for nothing."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII) else None


def changed(each: T, **changes: object) -> T:
    """Return a changed copy as dataclasses.replace does, ten times as fast: for the parts of hundreds of hosts.

    `each` is of a dataclass that has no slots and checks nothing as it is made; the changes are fields of it.
    """
    made = object.__new__(type(each))
    vars(made).update(vars(each), **changes)
    return made


def between_others(templates: Iterable[tuple[T, str, str]]) -> Iterator[T]:
    """Yield a copy of each link with other ends, as `changed` makes it, at half its cost; there may be many."""
    for each, a, b in templates:
        made = object.__new__(type(each))
        inside = vars(made)
        inside.update(vars(each))
        inside["a"], inside["b"] = a, b
        yield made


def unordered(a: str, b: str) -> tuple[str, str]:
    """Return two names, sorted."""
    return (a, b) if a <= b else (b, a)


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return all pairs, each once, in the order given."""
    listed = list(names)
    return [(a, b) for i, a in enumerate(listed) for b in listed[i + 1 :]]
