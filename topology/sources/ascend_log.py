"""A collection of Ascend tools' outputs, each after the command line that asked for it: one machine, one facts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Device, Facts, Link, Note, normal_bus_id, single_number
from tokenring.topology.sources import hccn_tool, npu_smi, npu_smi_fields, npu_smi_map, npu_topo

COMMAND = re.compile(
    r"^(?:[^\n|]{0,80}?[#$>] ?)?(?:/[\w./-]{0,80}/)?((?:npu-smi info|hccn_tool -)[^\n|]{0,120})$",
    re.MULTILINE | re.ASCII,
)
NPU = re.compile(r" -i +([0-9]{1,4})\b", re.ASCII)
MAX_SECTIONS = 4000
MAX_CHARACTERS = 2 << 20


@dataclass(frozen=True)
class Section:
    """A command and what it printed."""

    command: str
    text: str
    line: int  # before its first line

    @property
    def npu(self) -> int | None:
        """The NPU that the command names with -i; None if it names none."""
        match = NPU.search(self.command)
        return single_number(match[1]) if match else None


def recognises(text: str) -> bool:
    """Return whether a text has two commands: a single one is the prompt that somebody copied along."""
    start = text[:200_000]
    return "npu-smi" in start and sum(1 for _ in zip(range(2), COMMAND.finditer(start), strict=False)) > 1


def parse(text: str) -> Facts:
    """Parse the outputs one by one, and put together what they say of each NPU. Raises TopologyError."""
    sections = _sections(text)
    notes: list[Note] = []
    devices: dict[str, Device] = {}
    links: list[Link] = []
    coverage_links = False
    for section in sections:
        try:
            facts = _facts(section)
        except TopologyError as error:
            if section.text.strip():
                notes.append(Note(f"{section.command[:80]}: {error.message}"[:200], section.line + (error.line or 1)))
            continue
        if facts is None:
            continue
        coverage_links = coverage_links or facts.coverage == "links"
        for device in facts.devices:
            devices[device.id] = _completed(devices[device.id], device) if device.id in devices else device
        links += facts.links
        notes += [replace(each, line=each.line and each.line + section.line) for each in facts.notes]
    for section in sections:
        _complete(section, devices)
    if not devices and not notes:
        raise TopologyError("no known command here", 1, 1)
    found = tuple(devices.values())
    return Facts("links" if coverage_links else "devices", found, tuple(links), notes=tuple(notes[:64]))


def _sections(text: str) -> list[Section]:
    if len(text) > MAX_CHARACTERS:
        raise TopologyError(f"a collection of {len(text)} characters is too long; at most {MAX_CHARACTERS}", 1, 1)
    matches = list(COMMAND.finditer(text))
    if len(matches) > MAX_SECTIONS:
        raise TopologyError(f"more than {MAX_SECTIONS} commands", 1, 1)
    made = []
    line, counted = 1, 0
    for match, end in zip(matches, [*(each.start() for each in matches[1:]), len(text)], strict=True):
        line, counted = line + text.count("\n", counted, match.end()), match.end()
        made.append(Section(" ".join(match[1].split()), text[match.end() + 1 : end], line))
    return made


def _facts(section: Section) -> Facts | None:
    """Parse a section, with the port of the NPU that it is of; return None for commands that are not read."""
    if section.command.startswith("hccn_tool"):
        if not hccn_tool.recognises(section.text):
            return None
        return _of_port(hccn_tool.parse(section.text), section.npu)
    for parser in (npu_topo, npu_smi_map, npu_smi):
        if parser.recognises(section.text):
            facts: Facts = parser.parse(section.text)
            return facts
    return None


def _of_port(facts: Facts, npu: int | None) -> Facts:
    """Name ports after the NPU that they are of, where the command says it."""
    if npu is None:
        return facts
    names = {
        each.id: f"NPU{npu} {each.id}" for each in facts.devices if each.kind == "nic" and not each.id.startswith("NPU")
    }
    devices = [
        replace(each, id=names.get(each.id, each.id), index=npu if each.id == "port" else each.index)
        for each in facts.devices
    ]
    links = [replace(link, a=names.get(link.a, link.a), b=names.get(link.b, link.b)) for link in facts.links]
    notes = [replace(note, text=f"NPU{npu}: {note.text}") for note in facts.notes]
    return replace(facts, devices=tuple(devices), links=tuple(links), notes=tuple(notes))


def _complete(section: Section, devices: dict[str, Device]) -> None:
    """Add model and bus id to an NPU that another command named."""
    if section.npu is None or not npu_smi_fields.recognises(section.text):
        return
    found = npu_smi_fields.fields(section.text)
    chip = single_number(found["Chip ID"][0]) if "Chip ID" in found else None
    for device in _called(section.npu, chip, devices.values()):
        more = Device(
            device.id,
            device.kind,
            bus_id=normal_bus_id(found["PCIe Bus Info"][0]) if "PCIe Bus Info" in found else None,
            model=found["Chip Name"][0][:80] if "Chip Name" in found else None,
        )
        devices[device.id] = _completed(device, more)


def _called(npu: int, chip: int | None, devices: Iterable[Device]) -> list[Device]:
    mine = [each for each in devices if each.kind == "accelerator" and each.id.split(".")[0] == f"NPU{npu}"]
    return mine if len(mine) == 1 else [each for each in mine if chip is not None and each.die == chip]


def _completed(known: Device, more: Device) -> Device:
    return replace(known, **{k: v for k, v in vars(more).items() if getattr(known, k) is None and v is not None})
