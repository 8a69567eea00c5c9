"""NVIDIA's management library through nvidia-ml-py, where it is installed: it has more than nvidia-smi prints.

Imported only when asked for. What the driver refuses becomes a note; a driver without GPUs is an answer too.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tokenring.topology.model.facts import Coverage, Device, Facts, Link, Note, SourceOrigin, normal_bus_id, pairs
from tokenring.topology.sources.nvswitch import HIDDEN, trunk

MODULE = "pynvml"
MAX_GPUS = 64
MAX_LINKS = 36
ENABLED = 1
TO_CPU, TO_SWITCH = 1, 2  # nvmlIntNvLinkDeviceType_t
WAYS = {0: "pix", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}  # nvmlGpuTopologyLevel_t
NOT_HERE = ("NVMLError_NotSupported", "NVMLError_InvalidArgument", "NVMLError_FunctionNotFound", "AttributeError")


@dataclass
class _Asking:
    """Calls of the library; what fails is noted once."""

    module: Any
    failures: dict[str, None] = field(default_factory=dict)

    def __call__(self, name: str, *arguments: object) -> Any:
        """Call a function of the library; return None where there is no answer."""
        try:
            return getattr(self.module, name)(*arguments)
        except Exception as error:  # the bindings throw whatever the driver does: see NVMLError's subclasses
            if type(error).__name__ not in NOT_HERE:
                self.failures[f"{name}: {' '.join(str(error).split())[:100]}"] = None
            return None

    def text(self, name: str, *arguments: object) -> str | None:
        found = self(name, *arguments)
        if isinstance(found, bytes):  # older bindings
            return found.decode("utf-8", "replace")
        return found if isinstance(found, str) else None

    def bus_id(self, name: str, *arguments: object) -> str | None:
        found = getattr(self(name, *arguments), "busId", None)
        text = found.decode("ascii", "replace") if isinstance(found, bytes) else str(found or "")
        return normal_bus_id(text.rstrip("\0"))


def read_nvml(module: Any = None) -> Facts | None:
    """Read GPUs, their NVLinks and the ways between them; return None where the bindings are not installed.

    NUMA nodes are left to sysfs: what NVML calls a GPU's node is that of its own memory (Grace Hopper).
    """
    origin = SourceOrigin("NVML")
    try:
        module = module or importlib.import_module(MODULE)
    except ImportError:
        return None
    except Exception as error:  # another project's code: whatever it does when it is imported
        return Facts("devices", notes=(Note(f"{MODULE} cannot be imported: {str(error)[:100]}"),), origin=origin)
    asking = _Asking(module)
    try:
        module.nvmlInit()
    except Exception as error:  # no driver, no library, no permission
        return Facts("devices", notes=(Note(f"NVML: {' '.join(str(error).split())[:100]}"),), origin=origin)
    try:
        return _facts(asking).of(origin)
    finally:
        asking("nvmlShutdown")


def _facts(asking: _Asking) -> Facts:
    count = asking("nvmlDeviceGetCount")
    handles = {}
    for index in range(min(count, MAX_GPUS) if isinstance(count, int) else 0):
        if (handle := asking("nvmlDeviceGetHandleByIndex", index)) is not None:
            handles[f"GPU{index}"] = (index, handle)
    bus_ids = {name: asking.bus_id("nvmlDeviceGetPciInfo", handle) for name, (_, handle) in handles.items()}
    by_bus = {bus_id: name for name, bus_id in bus_ids.items() if bus_id}
    devices: list[Device] = []
    links: list[Link] = []
    attached: dict[str, set[str]] = {}
    ends: Counter[tuple[str, str]] = Counter()
    coverage: Coverage = "links"
    for name, (index, handle) in handles.items():
        found = _nvlinks(handle, by_bus, asking)
        devices.append(_device(name, index, handle, bus_ids[name], sum(found.values()), asking))
        for other, number in found.items():
            if other in handles:
                ends[name, other] += number
            elif other:
                attached.setdefault(other, set()).add(name)
                links.append(Link(name, other, "nvlink", number, switched=True))
            else:
                coverage = "devices"
    devices += [Device(name, "switch", bus_id=normal_bus_id(name)) for name in attached]
    for a, b in pairs(handles):
        if number := max(ends[a, b], ends[b, a]):
            links.append(Link(a, b, "nvlink", number if ends[a, b] == ends[b, a] else None))
        level = asking("nvmlDeviceGetTopologyCommonAncestor", handles[a][1], handles[b][1])
        if level in WAYS:
            links.append(Link(a, b, WAYS[level]))
    more, notes = trunk(attached)
    notes += [Note(f"NVML: {failure}") for failure in asking.failures]
    return Facts(coverage, tuple(devices), (*links, *more), notes=tuple(notes))


def _device(name: str, index: int, handle: object, bus_id: str | None, ports: int, asking: _Asking) -> Device:
    capability = asking("nvmlDeviceGetCudaComputeCapability", handle)
    return Device(
        name,
        "accelerator",
        index,
        bus_id=bus_id,
        model=asking.text("nvmlDeviceGetName", handle),
        arch=f"sm{capability[0]}{capability[1]}" if isinstance(capability, (tuple, list)) else None,
        vendor="nvidia",
        ports=ports,
    )


def _nvlinks(handle: object, by_bus: dict[str, str], asking: _Asking) -> Counter[str]:
    """Count the links that are up by what is at their other end; "" where that is not known."""
    found: Counter[str] = Counter()
    for link in range(min(getattr(asking.module, "NVML_NVLINK_MAX_LINKS", 18), MAX_LINKS)):
        if asking("nvmlDeviceGetNvLinkState", handle, link) != ENABLED:
            continue
        kind = asking("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        bus_id = asking.bus_id("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        hidden = bus_id is not None and bus_id.startswith("ffff")
        if hidden or kind == TO_SWITCH:
            found[HIDDEN if hidden or bus_id is None else bus_id] += 1
        elif kind != TO_CPU:
            found[by_bus.get(bus_id or "", "")] += 1
    return found
