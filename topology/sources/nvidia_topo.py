"""`nvidia-smi topo -m`: GPUs and NICs, NV# and PCIe labels, affinities."""

from __future__ import annotations

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Device, Facts, Note, single_number
from tokenring.topology.sources.matrix import (
    ACCELERATOR,
    Matrix,
    Row,
    coverage_of,
    has_cells,
    links_of,
    read_matrix,
    words_in,
)

LABELS = {"PIX", "PXB", "PHB", "NODE", "SYS", "SOC"}
OTHERS = ("MX", "MT", "MLK", "XGMI", "HCCS", "SIO", "UB")


def recognises(text: str) -> bool:
    """Return whether a text is nvidia-smi's matrix, and no other vendor's; see SourceParser."""
    start = text[:200_000]
    if "MetaX System Management" in start[:4000]:
        return False
    if "GPU0" not in start and not ("GPU" in start and "Affinity" in start):
        return False
    words = words_in(text)
    if any(word.startswith(OTHERS) for word in words):
        return False
    return bool(words & LABELS) or any(word.startswith("NV") for word in words) or "CPU Affinity" in start


def parse(text: str) -> Facts:
    """Parse GPUs, NICs, affinities and links. Raises TopologyError."""
    matrix = read_matrix(text)
    if not matrix.rows:
        raise TopologyError("no row of a matrix in it", text.count("\n") + 1, 1)
    rows = {row.name: row for row in matrix.rows}
    devices = [_device(name, rows.get(name), matrix) for name in matrix.names]
    links, notes = links_of(matrix, devices)
    notes = [*matrix.notes, *notes]
    if not has_cells(matrix):
        notes.append(Note("the matrix itself is left out: only affinities remain"))
        return Facts("devices", tuple(devices), notes=tuple(notes))
    coverage = coverage_of(matrix, matrix.accelerators, links)
    return Facts(coverage, tuple(devices), tuple(links), notes=tuple(notes))


def _device(name: str, row: Row | None, matrix: Matrix) -> Device:
    affinity = row.affinity if row else {}
    numa = affinity.get("NUMA Affinity")
    match = ACCELERATOR.fullmatch(name)
    return Device(
        id=name,
        kind="accelerator" if match else "nic",
        index=int(match[2]) if match else None,
        vendor="nvidia" if match else None,
        name=None if match else matrix.aliases.get(name),
        numa_node=single_number(numa),
        numa_affinity=numa,
        cpu_affinity=affinity.get("CPU Affinity"),
    )
