"""`ascend-dmi --bw -t p2p`: measurements between NPUs, as JSON for a pair or as a matrix for all."""

from __future__ import annotations

import re
from typing import Any

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Measurement, single_number
from tokenring.topology.sources.jsontext import Document, load, number

HEADING = re.compile(r"(Uni|Bi)directional Peer to Peer", re.IGNORECASE | re.ASCII)
RATE = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*(?:GB/s)?\s*", re.ASCII)
MAX_MATRIX = 128
MAX_LINES = 5000


def recognises(text: str) -> bool:
    """Return whether a text has the heading of a measurement; see SourceParser."""
    return HEADING.search(text[:20_000]) is not None


def parse(text: str) -> Facts:
    """Parse what was measured between NPUs, GB/s. Raises TopologyError if there is nothing."""
    document = load(text) if text.lstrip()[:1] == "{" else None
    rates, notes = (_of_json(document), document.notes) if document else (_of_matrices(text), [])
    if not rates:
        raise TopologyError("no measurement between two NPUs in it", 1, 1)
    ids = sorted({end for pair in rates for end in pair})
    if len(ids) > MAX_DEVICES:
        raise TopologyError(f"{len(ids)} devices; at most {MAX_DEVICES}", 1, 1)
    # A logical id: outside of containers also the number that `-t topo` gives, NPU3 or Phy-ID3.
    devices = [Device(f"NPU{each}", "accelerator", index=each, phy_id=each, vendor="huawei") for each in ids]
    measured = [
        Measurement(f"NPU{a}", f"NPU{b}", gbs=found.get("uni"), both_gbs=found.get("bi"), what="ascend-dmi")
        for (a, b), found in rates.items()
    ]
    return Facts("devices", tuple(devices), measurements=tuple(measured), notes=tuple(notes))


Rates = dict[tuple[int, int], dict[str, float]]


def _of_json(document: Document) -> Rates:
    """Take the rate of the largest transfer: small ones measure latency."""
    rates: Rates = {}
    for test in document.objects(document.root, "bandwidths"):
        heading = HEADING.search(str(test.get("type"))[:200])
        a, b = number(test.get("source_device_id")), number(test.get("target_device_id"))
        if heading is None or a is None or b is None or a == b:
            continue
        sized = [(_size(each), _rate(each.get("bandwidth"))) for each in document.objects(test, "results")]
        known = [(size, rate) for size, rate in sized if rate]
        if known:
            rates.setdefault((a, b), {})[heading[1].lower()] = max(known)[1]
    return rates


def _size(result: dict[str, Any]) -> int:
    match = re.match(r"[0-9]{1,15}", str(result.get("size"))[:40], re.ASCII)
    return int(match[0]) if match else 0


def _rate(value: object) -> float | None:
    match = RATE.fullmatch(str(value)[:40])
    return float(match[1]) if match else None


def _of_matrices(text: str) -> Rates:
    """Read matrices whose rows are sources and whose columns are targets, below a heading that names the test."""
    rates: Rates = {}
    kind: str | None = None
    columns: list[int] = []
    for line_number, line in enumerate(text.splitlines()[:MAX_LINES], 1):
        if heading := HEADING.search(line[:1000]):
            kind, columns = heading[1].lower(), []
            continue
        words = re.sub(r"[|+=]|-{2,}", " ", line[:10_000]).split()
        if kind is None or not words:
            continue
        ids = [single_number(re.sub(r"^[A-Za-z]+", "", each)) for each in words]
        if not columns:
            given = [each for each in ids if each is not None]
            if len(given) > 1 and len(set(given)) == len(given) and None not in ids[-len(given) :]:
                columns = given
            if len(columns) > MAX_MATRIX:
                raise TopologyError(f"more than {MAX_MATRIX} columns", line_number, 1)
            continue
        source, cells = ids[0], words[1:]
        if source is None or len(cells) != len(columns):
            continue
        for target, cell in zip(columns, cells, strict=True):
            if target != source and (rate := _rate(cell)):
                rates.setdefault((source, target), {})[kind] = rate
    return rates
