"""`npu-smi info -t topo`: NPUs (or dies, by Phy-ID), HCCS, SIO, UB and PCIe labels."""

from __future__ import annotations

import re
from dataclasses import replace

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Device, Facts, Link, Note, single_number
from tokenring.topology.sources.matrix import ACCELERATOR, Matrix, coverage_of, links_of, read_matrix, words_in

REFUSALS = re.compile(r"does not support querying [a-z-]+|dcmi model? ?\w* ?initiali[sz]ed? failed|ret is -80[0-9]{2}")
QUAD = 4  # 910A has HCCS in groups of four; wider direct HCCS is 910B


def recognises(text: str) -> bool:
    """Return whether a text has NPUs with labels, or npu-smi's refusal; see SourceParser."""
    start = text[:200_000]
    if REFUSALS.search(start[:4000]) and "NPU0" not in start:
        return True
    named = re.search(r"NPU[0-9]+\s|Phy-ID[0-9]+\s", start) is not None
    return named and bool(words_in(text))


def parse(text: str) -> Facts:
    """Parse the matrix of NPUs and its links. Raises TopologyError."""
    matrix = read_matrix(text)
    if not matrix.rows:
        return refused(text, "no row of a matrix in it")
    devices = [_device(name, matrix) for name in matrix.names]
    links, notes = links_of(matrix, devices)
    devices = _generation(devices, links)
    coverage = coverage_of(matrix, matrix.accelerators, links)
    return Facts(coverage, tuple(devices), tuple(links), notes=(*matrix.notes, *notes))


def refused(text: str, otherwise: str) -> Facts:
    """Return what npu-smi says instead of an answer. Raises TopologyError, saying `otherwise`, if it says nothing."""
    for number, line in enumerate(text.splitlines(), 1):
        if REFUSALS.search(line):
            return Facts("devices", notes=(Note(f"npu-smi says: {' '.join(line.split())[:200]}", number),))
    raise TopologyError(otherwise, text.count("\n") + 1, 1)


def _device(name: str, matrix: Matrix) -> Device:
    match = ACCELERATOR.fullmatch(name)
    affinity = next((row.affinity for row in matrix.rows if row.name == name), {})
    if match is None:
        return Device(name, "nic", name=matrix.aliases.get(name))
    number = int(match[2])
    by_phy_id = match[1] == "Phy-ID"
    return Device(
        id=name,
        kind="accelerator",
        index=None if by_phy_id else number,
        phy_id=number if by_phy_id else None,
        arch="A3" if by_phy_id else None,  # npu-smi counts by Phy-ID on A3 only
        vendor="huawei",
        cpu_affinity=affinity.get("CPU Affinity"),
        numa_node=single_number(affinity.get("NUMA Affinity")),
    )


def _generation(devices: list[Device], links: list[Link]) -> list[Device]:
    """Mark NPUs as 910B where HCCS says so, and as dies of one package where SIO does."""
    hccs: dict[str, int] = {}
    sio: dict[str, str] = {}
    for link in links:
        for one, other in ((link.a, link.b), (link.b, link.a)):
            if link.kind == "hccs" and not link.switched:
                hccs[one] = hccs.get(one, 0) + 1
            elif link.kind == "sio":
                sio[one] = "+".join(sorted((one, other)))
    wide = any(peers >= QUAD for peers in hccs.values())
    made = []
    for device in devices:
        arch = "910B" if wide and device.arch is None and device.id in hccs else device.arch
        made.append(replace(device, package=sio.get(device.id), arch=arch))
    return made
