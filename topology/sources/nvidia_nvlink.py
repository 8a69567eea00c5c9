"""`nvidia-smi nvlink -s` (rates), `-c` (capabilities) and `-R` (remote ends): each NVLink of each GPU."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Link, Note, normal_bus_id
from tokenring.topology.sources.nvswitch import HIDDEN, trunk

GPU = re.compile(r"\s*GPU ([0-9]{1,4}): (.{1,200}?)(?: \(UUID: [^)]*\))?\s*", re.ASCII)
LINK = re.compile(r"\s*Link ([0-9]{1,2})[:,] *(.*?)\s*", re.ASCII)
RATE = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,6})?) GB/s", re.ASCII)
REMOTE = re.compile(r"Remote Device ([0-9A-Fa-f]{1,8}:[0-9A-Fa-f]{1,2}:[0-9A-Fa-f]{1,2}\.[0-9A-Fa-f]).*", re.ASCII)
LONGEST = 400  # line
MAX_NOTES = 20
PAYLOAD = {26.562: 25.0, 53.125: 50.0}  # the rate on the wire, from Hopper on, and what of it carries data


@dataclass
class _Gpu:
    device: Device
    links: set[int] = field(default_factory=set)  # their numbers, be they up or down
    up: dict[int, float | None] = field(default_factory=dict)  # links by number
    remotes: Counter[str] = field(default_factory=Counter)


def recognises(text: str) -> bool:
    """Return whether a text has GPUs and links; see SourceParser."""
    start = [line[:LONGEST] for line in text[:20_000].splitlines()]
    return any(GPU.fullmatch(line) for line in start) and any(LINK.fullmatch(line) for line in start)


def parse(text: str) -> Facts:
    """Parse the GPUs and their links, with remote ends where there are any. Raises TopologyError."""
    gpus: list[_Gpu] = []
    notes: list[Note] = []
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole[:LONGEST]
        if match := GPU.fullmatch(line):
            name = f"GPU{int(match[1])}"
            if any(gpu.device.id == name for gpu in gpus) or len(gpus) >= MAX_DEVICES:
                raise TopologyError(f"{name} is there twice, or there are too many", number, 1)
            gpus.append(_Gpu(Device(name, "accelerator", int(match[1]), model=match[2].strip(), vendor="nvidia")))
        elif (match := LINK.fullmatch(line)) and gpus:
            _link(gpus[-1], int(match[1]), match[2])
        elif line.strip() and not line.strip(" \t.…"):
            notes.append(Note("parts are left out (...): links may be missing", number))
        elif line.strip() and gpus and len(notes) < MAX_NOTES:
            notes.append(Note(f"nvidia-smi says: {' '.join(line.split())[:200]}", number))
    if not gpus:
        raise TopologyError("no GPU in it", text.count("\n") + 1, 1)
    devices = [_device(gpu) for gpu in gpus]
    notes += _lost(gpus)
    if not any(gpu.remotes for gpu in gpus):
        notes.append(Note("where the links lead is not in it: nvidia-smi nvlink -R says"))
        return Facts("devices", tuple(devices), notes=tuple(notes))
    return _with_remotes(gpus, devices, notes)


def _link(gpu: _Gpu, number: int, words: str) -> None:
    gpu.links.add(number)
    if "inactive" in words.lower():
        return
    if match := RATE.fullmatch(words):
        rate = float(match[1])
        gpu.up[number] = PAYLOAD.get(rate, rate)
    elif match := REMOTE.fullmatch(words):
        if number not in gpu.up:
            gpu.remotes[match[1].lower()] += 1
        gpu.up[number] = None
    elif words.lower().startswith("p2p is supported: true"):
        gpu.up.setdefault(number, None)


def _lost(gpus: list[_Gpu]) -> list[Note]:
    """Note links that all other GPUs have, up or down: the text was cut in a GPU's list."""
    most = max(len(gpu.links) for gpu in gpus)
    short = [gpu for gpu in gpus if 0 < len(gpu.links) < most or (not gpu.links and gpu is gpus[-1] and most)]
    return [
        Note(f"{gpu.device.id} lists {len(gpu.links)} of {most} links: the others are missing", role="doubt")
        for gpu in short[:MAX_NOTES]
    ]


def _device(gpu: _Gpu) -> Device:
    rates = set(gpu.up.values())
    return replace(gpu.device, ports=len(gpu.up) if gpu.links else None, gbs=rates.pop() if len(rates) == 1 else None)


def _with_remotes(gpus: list[_Gpu], devices: list[Device], notes: list[Note]) -> Facts:
    linked = [gpu for gpu in gpus if gpu.remotes]
    peers = _as_peers(linked)
    if peers is not None:
        placed = {gpu.device.id: bus_id for bus_id, gpu in peers.items()}
        devices = [replace(each, bus_id=normal_bus_id(placed.get(each.id, ""))) for each in devices]
        found = [
            Link(gpu.device.id, peers[remote].device.id, "nvlink", count)
            for gpu in linked
            for remote, count in gpu.remotes.items()
            if gpu.device.index is not None and gpu.device.index < (peers[remote].device.index or 0)
        ]
        return Facts("links", tuple(devices), tuple(found), notes=tuple(notes))
    if not _are_switches(linked):
        notes.append(Note("the remote ends are neither these GPUs nor switches of all of them"))
        return Facts("devices", tuple(devices), notes=tuple(notes))
    attached: dict[str, set[str]] = {}
    links = []
    for gpu in linked:
        for remote, count in gpu.remotes.items():
            name = HIDDEN if remote.startswith("ffff") else remote
            attached.setdefault(name, set()).add(gpu.device.id)
            links.append(Link(gpu.device.id, name, "nvlink", count, switched=True))
    devices += [Device(name, "switch", bus_id=normal_bus_id(name)) for name in attached]
    more, assumed = trunk(attached)
    return Facts("links", tuple(devices), (*links, *more), notes=(*notes, *assumed))


def _as_peers(gpus: list[_Gpu]) -> dict[str, _Gpu] | None:
    """Return the GPU of each remote bus id, as nvidia-smi counts by them; None where that does not come out even."""
    remotes = sorted({remote for gpu in gpus for remote in gpu.remotes}, key=lambda r: normal_bus_id(r) or r)
    if len(remotes) != len(gpus) or any(remote.startswith("ffff") for remote in remotes):
        return None
    peers = dict(zip(remotes, sorted(gpus, key=lambda gpu: gpu.device.index or 0), strict=True))
    own = {gpu.device.id: remote for remote, gpu in peers.items()}
    for gpu in gpus:
        for remote, count in gpu.remotes.items():
            if peers[remote] is gpu or peers[remote].remotes[own[gpu.device.id]] != count:
                return None
    return peers


def _are_switches(gpus: list[_Gpu]) -> bool:
    """Return whether GPUs fall into groups that all reach the same remote ends, and no group another's."""
    if all(remote.startswith("ffff") for gpu in gpus for remote in gpu.remotes):
        return True
    groups = Counter(frozenset(gpu.remotes) for gpu in gpus)
    disjoint = sum(len(group) for group in groups) == len(frozenset().union(*groups))
    return disjoint and min(groups.values()) > 1
