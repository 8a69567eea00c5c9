"""`npu-smi info`: NPUs, their chips or dies, models and bus ids; physical ids where the header has them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Note, normal_bus_id, single_number
from tokenring.topology.sources.npu_topo import refused

BANNER = re.compile(r"\| {0,40}npu-smi |\| {0,40}NPU(?: ID)? {0,40}\|? {0,40}Name ", re.ASCII)
A3 = re.compile(r"(?:Ascend ?)?910(?:C|_93[0-9]{2})?", re.ASCII)
FILLER = re.compile(r"x+|-|NA|N/A|unknown", re.IGNORECASE)  # what documentation and drivers put for nothing
ELIDED = "rows are left out: which NPUs they name is not known"
MAX_LINES = 20_000
ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Chip:
    """A chip, or a die of a package: `npu` is the package."""

    npu: int
    chip: int
    phy_id: int | None = None
    logic_id: int | None = None
    model: str | None = None
    bus_id: str | None = None


Chips = dict[tuple[int, int], Chip]


def recognises(text: str) -> bool:
    """Return whether a text has the head of npu-smi's table; see SourceParser."""
    return BANNER.search(text[:200_000]) is not None


def parse(text: str) -> Facts:
    """Parse NPUs, their chips, models and bus ids. Raises TopologyError."""
    chips, notes = _table(text)
    return Facts("devices", tuple(devices_of(chips)), notes=tuple(notes)) if chips else refused(text, "no NPU in it")


def _table(text: str) -> tuple[list[Chip], list[Note]]:
    """Read `info`: a line of the NPU, then one of each chip; processes follow, which are no devices."""
    chips: Chips = {}
    notes: list[Note] = []
    second = None  # what the second number of a chip's line is
    npu: int | None = None
    model: str | None = None
    heads: dict[int, int] = {}  # NPUs and their lines
    for number, line in enumerate(text.splitlines()[:MAX_LINES], 1):
        line = ESCAPE.sub("", line)
        if is_elision(line):
            notes.append(Note(ELIDED, number))
        if "Process id" in line:
            break
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.strip().startswith("|") or len(cells) < 3:
            continue
        if found := re.search(r"Chip\s+(Phy-ID|Device)", cells[0]):
            second = found[1]
        # The 950 has a column of its own for the name, and leaves the first two empty in a chip's line.
        ids, (name, value) = cells[0].split(), ("", cells[1])
        if len(cells) > 3:
            name, value = cells[1:3]
        elif len(ids) > 1 and single_number(ids[1]) is None:
            ids, name = ids[:1], " ".join(ids[1:])
        numbers = [single_number(word) for word in ids]
        if None in numbers:
            continue
        if name and numbers:
            npu, model = numbers[0], model_name(name)
            heads.setdefault(npu or 0, number)
            if value not in ("OK", ""):
                notes.append(Note(f"NPU {npu} reports health {value[:40]}", number))
        elif npu is None and normal_bus_id(value):
            notes.append(Note("a chip without its NPU: not used", number))
        elif npu is not None and (numbers or len(cells) > 3):
            chip, more = [*numbers, None, None][:2]
            physical, logic = (more, None) if second == "Phy-ID" else (None, more)
            take(chips, Chip(npu, chip or 0, physical, logic, model, normal_bus_id(value)), number)
    bare = set(heads) - {npu for npu, _ in chips}
    notes += [Note(f"NPU {npu} is cut before its chips: not used", heads[npu], role="doubt") for npu in sorted(bare)]
    return list(chips.values()), notes[:64]


def take(chips: Chips, chip: Chip, line: int) -> None:
    """Add a chip; the first of its number counts. Raises TopologyError for more than MAX_DEVICES."""
    if len(chips) >= MAX_DEVICES:
        raise TopologyError(f"more than {MAX_DEVICES} chips", line, 1)
    chips.setdefault((chip.npu, chip.chip), chip)


def is_elision(line: str) -> bool:
    """Return whether a line says that rows are left out."""
    return bool(line.strip()) and set(line.strip()) <= set(".…| ") and ("..." in line or "…" in line)


def model_name(name: str) -> str | None:
    """Return a model's name; None for a filler."""
    return None if not name or FILLER.fullmatch(name) else name


def devices_of(chips: list[Chip]) -> list[Device]:
    """Return chips under the names of the other outputs.

    `-t topo` says NPU3 where a package has one chip, else Phy-ID6.
    """
    dies = Counter(chip.npu for chip in chips)
    several = any(count > 1 for count in dies.values()) or any(chip.chip > 0 for chip in chips)
    shared = Counter(chip.phy_id for chip in chips)
    devices = []
    for chip in chips:
        if shared[chip.phy_id] > 1:  # then it is not what tells them apart
            chip = replace(chip, phy_id=None)
        is_die = several or chip.phy_id not in (None, chip.npu)
        device = Device(
            f"NPU{chip.npu}",
            "accelerator",
            index=chip.npu,
            bus_id=chip.bus_id,
            phy_id=chip.phy_id,
            model=chip.model,
            arch=_arch(chip.model, chip.phy_id),
            vendor="huawei",
        )
        if is_die:
            name = f"NPU{chip.npu}.{chip.chip}" if chip.phy_id is None else f"Phy-ID{chip.phy_id}"
            place = f"{chip.npu}/{chip.chip}"  # what two tables without Phy-ID have in common
            device = replace(device, id=name, index=chip.logic_id, die=chip.chip, package=f"NPU{chip.npu}", name=place)
        devices.append(device)
    return devices


def _arch(model: str | None, phy_id: int | None) -> str | None:
    """Return the generation.

    A3 is called "Ascend910" and no more; it alone of these has physical ids of its own.
    """
    if model and "950" in model:
        return "950"
    return "A3" if model and phy_id is not None and A3.fullmatch(model) else None
