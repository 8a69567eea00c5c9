"""hccn_tool and /etc/hccn.conf: the network ports of NPUs, their addresses, speeds and states.

Most outputs are of one port and do not say whose: it is called "port". Its link leads to "network".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import cast

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Device, Facts, Link, LinkState, Note, single_number

STATES = {"UP": "up", "DOWN": "down", "NORMAL": "up"}  # PARTIAL is neither
MAX_PORTS = 512
MAX_LINES = 20_000
MAX_LINE = 500
OPENERS = re.compile(
    r"^[ \t]*(?:link status ?:|net health status ?:|ipaddr:|netmask:|Netdev status:|optical info:|Chassis ID TLV"
    r"|Port ID TLV|\[dev(?:id|ice) ?[0-9]+\]|device [0-9]+ PING|Routing table:|dev_id:[0-9]+, tls|packet statistics:"
    r"|fec mode:|address_[0-9]+=|Get ipconf failed|Speed: [0-9]+ ?Mb/s"
    r"|\| *UDie ID *\| *Port ID|\| *NPU *\| *UDie *\| *Port|\| *Interface Name *\|)",
    re.MULTILINE | re.ASCII,
)
STATUS = re.compile(r"(?:link status|net health status) ?: ?([A-Za-z ]{1,40})", re.ASCII)
PORT = re.compile(r"port ([0-9]{1,4}) ?: ?([A-Za-z ]{1,40})", re.ASCII)
CHANGE = re.compile(r"\[dev(?:id|ice) ?([0-9]{1,4})\] ?(.*)", re.ASCII)
SPEED = re.compile(r"Speed: ?([0-9]{1,7}) ?Mb/s.*", re.ASCII)
CONFIGURED = re.compile(r"address_([0-9]{1,4})=([0-9A-Fa-f.:]{2,45})", re.ASCII)
TOLD = re.compile(
    r"(?:present +:.*|fec mode:.*|Ifname: .*|[0-9]+ packets transmitted.*|Get ipconf failed.*|.*tls switch.*"
    r"|Settings for .*|IPv[46]: .*)",
    re.ASCII,
)


@dataclass
class _Port:
    """The figures that lines gave of a port."""

    npu: int | None = None  # whose only port it is
    address: str | None = None
    gbs: float | None = None
    state: str | None = None


@dataclass
class _Ports:
    by_name: dict[str, _Port] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def port(self, name: str, line: int, npu: int | None = None) -> _Port:
        if name not in self.by_name and len(self.by_name) >= MAX_PORTS:
            raise TopologyError(f"more than {MAX_PORTS} ports", line, 1)
        return self.by_name.setdefault(name, _Port(npu))

    def of_npu(self, npu: int, line: int) -> _Port:
        return self.port(f"NPU{npu} port", line, npu)


def recognises(text: str) -> bool:
    """Return whether a text has a line of hccn_tool; see SourceParser."""
    return OPENERS.search(text[:20_000]) is not None


def parse(text: str) -> Facts:
    """Parse ports with their addresses, speeds and states. Raises TopologyError."""
    ports = _Ports()
    titles: list[str] = []
    for number, line in enumerate(text.splitlines()[:MAX_LINES], 1):
        line = line.strip()[:MAX_LINE]
        if line.startswith("|"):
            titles = _row(line, number, titles, ports)
        else:
            _line(line, number, ports)
    if not ports.by_name and not ports.notes:
        if not recognises(text):
            raise TopologyError("no line of hccn_tool in it", 1, 1)
        ports.notes.append(Note("hccn_tool names no port, address or state"))
    devices = [Device(name, "nic", index=each.npu, name=each.address, gbs=each.gbs, vendor="huawei")
               for name, each in ports.by_name.items()]  # fmt: skip
    far = "network"
    while far in ports.by_name:
        far += "'"
    known = [(name, cast(LinkState, each.state)) for name, each in ports.by_name.items() if each.state]
    if known:
        devices.append(Device(far, "switch"))
    links = [Link(name, far, "network", state=state) for name, state in known]
    return Facts("devices", tuple(devices), tuple(links), notes=tuple(ports.notes[:64]))


def _line(line: str, number: int, ports: _Ports) -> None:
    if match := STATUS.fullmatch(line):
        said = match[1].upper()
        if "health" not in line:
            ports.port("port", number).state = STATES.get(said)
        if STATES.get(said) != "up" and said != "SUCCESS":
            ports.notes.append(Note(" ".join(line.split()), number))
    elif match := PORT.fullmatch(line):
        ports.port(f"port {match[1]}", number).state = STATES.get(match[2].upper())
        if match[2].upper() != "UP":
            ports.notes.append(Note(" ".join(line.split()), number))
    elif match := CONFIGURED.fullmatch(line):
        ports.of_npu(int(match[1]), number).address = match[2]
    elif match := SPEED.fullmatch(line):
        ports.port("port", number).gbs = int(match[1]) / 8000 or None
    elif line.startswith("ipaddr:"):
        ports.port("port", number).address = " ".join(line[7:].split())[:64] or None
    elif match := CHANGE.fullmatch(line):
        ports.of_npu(int(match[1]), number)
        if "link up count" in match[2]:
            ports.notes.append(Note(" ".join(line.split()), number))
    elif TOLD.fullmatch(line):
        ports.notes.append(Note(" ".join(line.split())[:160], number))


def _row(line: str, number: int, titles: list[str], ports: _Ports) -> list[str]:
    """Read a row of the 950's tables; return the titles that hold for the next one."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if any(cell in ("Port ID", "Port", "Interface Name", "EID") for cell in cells):
        return cells
    row = dict(zip(titles, cells, strict=False))
    port = single_number(row.get("Port ID", row.get("Port")))
    if port is not None:
        die = single_number(row.get("UDie ID", row.get("UDie")))
        npu = f"NPU{row['NPU']} " if single_number(row.get("NPU")) is not None else ""
        found = ports.port(f"{npu}{'?' if die is None else die}/{port}", number)
        speed = re.match(r"([0-9]{1,5})\b", row.get("Speed Ability(Gbps)", row.get("Speed", "")), re.ASCII)
        found.gbs = (int(speed[1]) / 8 or None) if speed else None
        found.state = STATES.get(row.get("Link Status", row.get("Status", "")).upper())
    elif row.get("Interface Name"):
        ports.port(row["Interface Name"][:64], number).address = row.get("IP Address") or None
    return titles
