"""The node file of Ascend's volcano scheduler: which servers hang from which leaf switch (ToR)."""

from __future__ import annotations

from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Note
from tokenring.topology.sources.jsontext import load, number, word


def recognises(text: str) -> bool:
    """Return whether a text has a list of servers and a ToR; see SourceParser."""
    start = text[:200_000]
    return "{" in start[:1000] and '"server_list"' in start and ('"tor_id"' in start or '"tor_ip"' in start)


def parse(text: str) -> Facts:
    """Parse leaf switches, servers and NPUs. Raises TopologyError."""
    document = load(text)
    devices: list[Device] = []
    notes = list(document.notes)
    hosts: set[str] = set()
    for at, tor in enumerate(document.objects(document.root, "server_list")):
        identity = number(tor.get("tor_id"))
        leaf = f"tor{at if identity is None else identity}"
        devices.append(Device(leaf, "switch", name=word(tor.get("tor_ip"))))
        for flag in ("IsSharedTor", "IsHealthy"):
            if flag in tor:
                notes.append(Note(f"{leaf} has {flag} {word(tor[flag])}"))
        for server in document.objects(tor, "server"):
            host = word(server.get("server_ip"))
            count = number(server.get("npu_count"))
            if host is None or count is None:
                raise document.fail("a server without 'server_ip' and 'npu_count'", "server")
            if host in hosts:
                raise document.fail(f"server {host} stands twice", "server_ip")
            if len(devices) + count >= MAX_DEVICES:
                raise document.fail(f"more than {MAX_DEVICES} devices", "npu_count")
            hosts.add(host)
            devices.append(Device(host, "host", name=host, host=host, parent=leaf))
            devices += [
                Device(f"{host}/NPU{i}", "accelerator", index=i, vendor="huawei", host=host, parent=host)
                for i in range(count)
            ]
    names = [device.id for device in devices]
    if len(set(names)) < len(names):
        raise document.fail("two switches have one 'tor_id'", "tor_id")
    said = number(document.root.get("tor_count"))
    there = sum(device.kind == "switch" for device in devices)
    if said is not None and said != there:
        notes.append(Note(f"tor_count is {said}, but {there} are listed"))
    return Facts("devices", tuple(devices), notes=tuple(notes[:64]))
