"""`mx-smi topo -m` and `-n`, and matrices of its kind from other vendors: nvidia-smi's form, labels of their own."""

from __future__ import annotations

import re

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Device, Facts, single_number
from tokenring.topology.sources.matrix import ACCELERATOR, Matrix, coverage_of, links_of, read_matrix, words_in

LABELS = {"MX": "metax", "MT": "mthreads", "MLK": "cambricon"}
TITLE = re.compile(r"MetaX System Management|mx-smi\b")


def recognises(text: str) -> bool:
    """Return whether a text has MetaX's title, or labels of these vendors; see SourceParser."""
    start = text[:200_000]
    named = "GPU0" in start and TITLE.search(start[:4000]) is not None
    return named or any(word.rstrip("0123456789") in LABELS for word in words_in(start))


def parse(text: str) -> Facts:
    """Parse GPUs, NICs, affinities and links. Raises TopologyError."""
    matrix = read_matrix(text.replace("Node Affinity", "NUMA Affinity"))
    if not matrix.rows:
        raise TopologyError("no row of a matrix in it", text.count("\n") + 1, 1)
    labels = {label.rstrip("0123456789") for row in matrix.rows for label in row.labels}
    vendor = next((vendor for label, vendor in LABELS.items() if label in labels), None)
    if TITLE.search(text[:4000]):
        vendor = "metax"
    devices = [_device(name, vendor, matrix) for name in matrix.names]
    links, notes = links_of(matrix, devices)
    coverage = coverage_of(matrix, matrix.accelerators, links)
    return Facts(coverage, tuple(devices), tuple(links), notes=(*matrix.notes, *notes))


def _device(name: str, vendor: str | None, matrix: Matrix) -> Device:
    affinity = next((row.affinity for row in matrix.rows if row.name == name), {})
    match = ACCELERATOR.fullmatch(name)
    if match is None:
        return Device(name, "nic", name=matrix.aliases.get(name))
    numa = affinity.get("NUMA Affinity")
    return Device(
        name,
        "accelerator",
        int(match[2]),
        vendor=vendor,
        numa_node=single_number(numa),
        numa_affinity=numa,
        cpu_affinity=affinity.get("CPU Affinity"),
    )
