"""A matrix of labels as JSON: `{"hardware": ..., "ids": [...], "matrix": [["X", "NV4"], ...], "facts": [...]}`.

For layouts of which only facts are known and no dump: labels as tools print them, "NVS18" for 18 NVLinks to a
switch, "missing" for no link. Where a pair says PCIE only, `facts` may say its hops, as rocm-smi counts them.
"""

from __future__ import annotations

import re

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Link, Note, changed, unordered
from tokenring.topology.model.labels import meaning
from tokenring.topology.model.schema import is_document, load_json

TO_SWITCH = re.compile(r"NVS([0-9]{1,2})", re.ASCII)
HOPS = re.compile(r"hops ([0-9])\)? for (every pair|the others|pairs ([0-9]+-[0-9]+(?:(?:, | and )[0-9]+-[0-9]+)*))")
REACHED = {"2": "node", "3": "sys"}


def recognises(text: str) -> bool:
    """Return whether a text is a JSON object with a matrix; see SourceParser."""
    return text.lstrip()[:1] == "{" and '"matrix"' in text[:20_000] and not is_document(text)


def parse(text: str) -> Facts:
    """Parse devices and the labels of their pairs; `facts` become notes. Raises TopologyError."""
    document = load_json(text)
    if not isinstance(document, dict):
        raise TopologyError("expected an object", 1, 1)
    ids, matrix = document.get("ids"), document.get("matrix")
    if not isinstance(ids, list) or not isinstance(matrix, list) or not ids or len(ids) != len(matrix):
        raise TopologyError("expected ids, and a matrix of as many rows", 1, 1)
    if len(ids) > MAX_DEVICES or not all(isinstance(each, str) and each.isascii() for each in ids):
        raise TopologyError(f"expected ids that are words, {MAX_DEVICES} at most", 1, 1)
    if len({*ids}) < len(ids):
        raise TopologyError("two ids are the same", 1, 1)
    for number, row in enumerate(matrix):
        if not isinstance(row, list) or len(row) != len(ids) or not all(isinstance(word, str) for word in row):
            raise TopologyError(f"row {number} of the matrix is not a list of {len(ids)} labels", 1, 1)
    said = document.get("facts")
    words = [each[:300] for each in said if isinstance(each, str)][:20] if isinstance(said, list) else []
    hardware = document.get("hardware")
    model = hardware[:100] if isinstance(hardware, str) else None
    devices = tuple(_device(name, number, model) for number, name in enumerate(ids))
    links, notes = _links(devices, matrix, _hops(words))
    return Facts("links", devices, tuple(links), notes=(*notes, *(Note(each) for each in words)))


def _device(name: str, number: int, model: str | None) -> Device:
    return Device(f"#{name}" if name.isdigit() else name or f"#{number}", "accelerator", number, model=model)


def _hops(words: list[str]) -> dict[str, str]:
    """Return the way that hops stand for, by pair ("1-2") or for all ("*")."""
    found: dict[str, str] = {}
    for match in HOPS.finditer(" ".join(words)):
        names = re.findall(r"[0-9]+-[0-9]+", match[3]) if match[3] else ["*"]
        found |= {name: REACHED.get(match[1], "pcie") for name in names}
    return found


def _links(devices: tuple[Device, ...], matrix: list[list[str]], hops: dict[str, str]) -> tuple[list[Link], list[Note]]:
    links: list[Link] = []
    notes: list[Note] = []
    made: dict[str, Link | None] = {}
    for i, a in enumerate(devices):
        for j in range(i + 1, len(devices)):
            label, back = matrix[i][j], matrix[j][i]
            if label != back:
                pair = " and ".join(unordered(a.id, devices[j].id))
                notes.append(Note(f"{pair} are {label[:20]!r} one way, {back[:20]!r} the other: unknown"))
                continue
            if label not in made:
                made[label] = _link(label)
            if (link := made[label]) is not None:
                way = hops.get(f"{i}-{j}", hops.get("*")) if hops and link.kind == "pcie" else None
                links.append(changed(link, a=a.id, b=devices[j].id, kind=way or link.kind))
    return links, notes[:20]


def _link(label: str) -> Link | None:
    """Return the link that a label stands for, of no two devices yet; None if it stands for none."""
    if match := TO_SWITCH.fullmatch(label):
        return Link("", "", "nvlink", int(match[1]), switched=True, label=label)
    found = meaning(label)
    return Link("", "", found.kind, found.count, switched=found.switched, label=label) if found else None
