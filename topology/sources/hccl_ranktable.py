"""HCCL rank tables 1.0, 1.2 and 2.0, and the older group_list: which NPU of which server is which rank.

They say who takes part and over which addresses, and nothing of the links inside a server.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Note
from tokenring.topology.sources.jsontext import Document, load, number, word

ADDRESS = re.compile(r"[0-9a-fA-F]*[.:][0-9a-fA-F.:]+", re.ASCII)
LISTS = ("server_list", "rank_list", "group_list", "server_group_list")
WORDS = ("device_id", "device_ip", "rank_id", "rank_count", "server_count", "group_count")
ARCHS = {"1.2": "A3", "2.0": "950"}  # the versions that one generation has to itself
PRODUCTS = {"A2": "910B", "A3": "A3"}  # "800I-A2-32G"


def recognises(text: str) -> bool:
    """Return whether a text has one of the lists of a rank table, and one of its words; see SourceParser."""
    start = text[:200_000]
    if "{" not in start[:1000] or not any(f'"{name}"' in start for name in LISTS):
        return False
    return any(f'"{name}"' in start for name in WORDS)


def parse(text: str) -> Facts:
    """Parse NPUs with their servers and network ports. Raises TopologyError, also for a version that is unknown."""
    document = load(text)
    root = document.root
    version = word(root.get("version"))
    known = next((name for name in LISTS if name in root), None)
    if known is None:
        raise document.fail(f"a rank table has one of {', '.join(LISTS)}", "version")
    if version not in (None, "1.0", "1.2", "2.0"):
        raise document.fail(f"rank table version {version!r}: known are 1.0, 1.2 and 2.0", "version")
    if known == "rank_list":
        devices, notes = _of_ranks(document)
    else:
        devices, notes = _of_servers(document, _servers(document, known), version)
    if (status := word(root.get("status"))) not in (None, "completed"):
        notes.append(Note(f"the table's status is {status!r}: ranks may be missing"))
    return Facts("devices", tuple(devices), notes=(*document.notes, *notes[:64]))


def _servers(document: Document, known: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return servers and their devices, of either form."""
    if known == "server_list":
        listed = document.objects(document.root, known)
        return [(server, document.objects(server, "device")) for server in listed]
    groups = document.objects(document.root, known)
    if known == "server_group_list":  # of all instances that serve a model: each counts its ranks from 0
        listed = [server for group in groups for server in document.objects(group, "server_list")]
        return [(server, _without_ranks(document.objects(server, "device"))) for server in listed]
    instances = [instance for group in groups for instance in document.objects(group, "instance_list")]
    return [(instance, document.objects(instance, "devices")) for instance in instances]


def _without_ranks(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in each.items() if key != "rank_id"} for each in devices]


def _of_servers(
    document: Document, servers: list[tuple[dict[str, Any], list[dict[str, Any]]]], version: str | None
) -> tuple[list[Device], list[Note]]:
    devices: list[Device] = []
    notes = []
    _bound(document, sum(len(listed) for _, listed in servers), "device_id")
    names = list(dict.fromkeys(word(server.get("server_id")) or "?" for server, _ in servers))
    for server, listed in servers:
        name = word(server.get("server_id")) or "?"
        arch = ARCHS.get(version or "") or _product(server)
        for each in listed:
            devices.append(_device(document, each, name, arch, len(devices)))
    said = number(document.root.get("server_count"))
    if said is not None and said != len(names):
        notes.append(Note(f"server_count is {said}, but {len(names)} servers are listed"))
    for pod in document.objects(document.root, "super_pod_list"):
        members = [word(each.get("server_id")) or "?" for each in document.objects(pod, "server_list")]
        notes.append(Note(f"super pod {word(pod.get('super_pod_id'))}, linked by HCCS: {', '.join(members[:64])}"))
    return _with_nics(_unique(document, devices), servers), notes


def _product(server: dict[str, Any]) -> str | None:
    match = re.search(r"-(A[0-9])-", word(server.get("hardware_type")) or "")
    return PRODUCTS.get(match[1]) if match else None


def _device(document: Document, each: dict[str, Any], host: str, arch: str | None, at: int) -> Device:
    physical = number(each.get("device_id"))
    if physical is None:
        raise document.fail("a device without a number as its 'device_id'", "device_id")
    rank = number(each.get("rank_id"))
    name = f"device{at}" if rank is None else f"rank{rank}"
    return Device(name, "accelerator", index=physical, phy_id=physical, arch=arch, vendor="huawei", host=host)


def _unique(document: Document, devices: list[Device]) -> list[Device]:
    doubled = [name for name, count in Counter(device.id for device in devices).items() if count > 1]
    if doubled:
        raise document.fail(f"{doubled[0]} stands twice", "rank_id")
    return devices


def _with_nics(devices: list[Device], servers: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[Device]:
    """Add the network port of each NPU, where all of them have room."""
    nics = []
    for device, each in zip(devices, (each for _, listed in servers for each in listed), strict=True):
        address = word(each.get("device_ip"))
        if address and ADDRESS.fullmatch(address):
            nics.append(Device(f"{device.id} nic", "nic", name=address, host=device.host, parent=device.id))
    return devices + nics if len(devices) + len(nics) <= MAX_DEVICES else devices


def _bound(document: Document, count: int, key: str) -> None:
    if count > MAX_DEVICES:
        raise document.fail(f"{count} devices; at most {MAX_DEVICES}", key)


def _of_ranks(document: Document) -> tuple[list[Device], list[Note]]:
    """Read version 2.0.

    The server is the instance of layer 0; a local id that comes again there is of another server.
    """
    ranks = document.objects(document.root, "rank_list")
    _bound(document, len(ranks), "rank_list")
    devices = []
    layers: dict[tuple[int, str], int] = {}
    seen: Counter[tuple[str | None, int]] = Counter()
    for each in ranks:
        rank, local = number(each.get("rank_id")), number(each.get("local_id"))
        if rank is None or local is None:
            raise document.fail("a rank without numbers as its 'rank_id' and 'local_id'", "rank_id")
        host = None
        for level in document.objects(each, "level_list"):
            layer, instance = number(level.get("net_layer")), word(level.get("net_instance_id"))
            if layer == 0:
                host = instance
            elif layer is not None:
                key = (layer, f"{word(level.get('net_type')) or 'network'} {instance or ''}".strip())
                layers[key] = layers.get(key, 0) + 1
        before = seen[host, local]
        seen[host, local] += 1
        devices.append(
            Device(
                f"rank{rank}",
                "accelerator",
                index=local,
                phy_id=number(each.get("device_id")),
                arch="950",
                vendor="huawei",
                host=host if before == 0 else f"{host or 'server'}#{before + 1}",
            )
        )
    notes = [Note(f"layer {layer}: {count} ranks on {name}") for (layer, name), count in sorted(layers.items())]
    said = number(document.root.get("rank_count"))
    if said is not None and said != len(devices):
        notes.append(Note(f"rank_count is {said}, but {len(devices)} ranks are listed"))
    return _unique(document, devices), notes
