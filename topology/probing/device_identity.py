"""The seat of a rank: its machine, and its accelerator by names that do not depend on what a process may see.

Inside a process accelerators are counted anew (CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES), so an index
says nothing about the machine. Bus ids and physical ids do.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tokenring.topology.model.facts import normal_bus_id

if TYPE_CHECKING:
    import torch

Load = Callable[[str], Any]
# By kind of device: libraries, and the function that tells a bus id of an index.
BUS_ID_CALLS = {
    "cuda": (("libcuda.so.1", "cuDeviceGetPCIBusId"), ("libamdhip64.so", "hipDeviceGetPCIBusId")),
}


@dataclass(frozen=True)
class Seat:
    """The machine and the accelerator of a rank.

    `kind` is torch's word for the device: "cuda", "npu", "cpu". `why_unknown`: why no id of it is known.
    """

    host: str
    boot_id: str
    kind: str = "cpu"
    bus_id: str | None = None
    phy_id: int | None = None
    die: int | None = None
    why_unknown: str | None = None

    def to_text(self) -> str:
        """Return the seat as JSON, which from_text reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Seat:
        """Read a seat from its JSON."""
        return Seat(**json.loads(text))


def host_names(seats: Sequence[Seat]) -> tuple[str, ...]:
    """Return the name of each rank's host. Two machines of one name get numbers.

    As in NCCL, a host is a host name and a boot: two containers with names of their own count as two.
    """
    found: dict[str, list[str]] = {}
    for seat in seats:
        boots = found.setdefault(seat.host, [])
        if seat.boot_id not in boots:
            boots.append(seat.boot_id)
    taken: dict[tuple[str, str], str] = {}
    for host, boots in found.items():
        for number, boot_id in enumerate(boots):
            taken[host, boot_id] = f"{host}#{number + 1}" if len(boots) > 1 else host
    return tuple(taken[seat.host, seat.boot_id] for seat in seats)


def this_seat(device: torch.device | None = None) -> Seat:
    """Return the seat of this process. device: None for the current accelerator, the CPU where there is none."""
    from tokenring.backends.control.process_info import this_process

    member = this_process()
    try:
        kind, index = _used(device)
        bus_id = _bus_id_from_torch(index) if kind == "cuda" else None
    except Exception as error:  # whatever torch and drivers raise: the other ranks wait for an answer
        name = "the current accelerator" if device is None else str(device)
        reason = f"{name} cannot be used: {' '.join(str(error).split())[:100]}"
        return Seat(member.host, member.boot_id, "unknown" if device is None else device.type, why_unknown=reason)
    if kind == "cpu":
        return Seat(member.host, member.boot_id)
    bus_id = bus_id or _bus_id(kind, index, _load)
    phy_id = physical_id(index, _load, os.environ.get("ASCEND_RT_VISIBLE_DEVICES")) if kind == "npu" else None
    known = bus_id is not None or phy_id is not None
    why = None if known else f"nothing here tells the bus id or physical id of {kind}:{index}"
    return Seat(member.host, member.boot_id, kind, bus_id, phy_id, why_unknown=why)


def _used(device: torch.device | None) -> tuple[str, int]:
    import torch

    from tokenring.backends.devices import has_device

    if device is not None and device.index is not None:
        return device.type, device.index
    for kind in ("cuda", "npu") if device is None else (device.type,):  # torch.npu is there once torch_npu is imported
        if kind != "cpu" and has_device(kind):
            return kind, getattr(torch, kind).current_device()
    return "cpu", 0


def _bus_id_from_torch(index: int) -> str | None:
    """Ask torch for the bus id: newer versions have it, for CUDA and for ROCm."""
    import torch

    told = torch.cuda.get_device_properties(index)
    parts = [getattr(told, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    numbers = [part for part in parts if isinstance(part, int)]
    return normal_bus_id("{:04x}:{:02x}:{:02x}".format(*numbers)) if len(numbers) == len(parts) else None


def _bus_id(kind: str, index: int, load: Load) -> str | None:
    """Ask the driver's library for the bus id: it counts devices as this process does."""
    for library, function in BUS_ID_CALLS.get(kind, ()):
        text = ctypes.create_string_buffer(64)
        try:
            if getattr(load(library), function)(text, len(text), index) == 0:
                return normal_bus_id(text.value.decode("ascii", "replace"))
        except (OSError, AttributeError):
            continue
    return None


def physical_id(index: int, load: Load, visible: str | None) -> int | None:
    """Return an NPU's physical id: from CANN, old and new; else from the list of those that the process may see."""
    try:
        acl, number = load("libascendcl.so"), ctypes.c_int32(index)
        if acl.aclrtGetLogicDevIdByUserDevId(index, ctypes.byref(number)) == 0:
            found = ctypes.c_int32(-1)
            if acl.aclrtGetPhyDevIdByLogicDevId(number, ctypes.byref(found)) == 0 and found.value >= 0:
                return found.value
    except (OSError, AttributeError):
        pass
    try:
        old = ctypes.c_uint32()
        if load("libruntime.so").rtGetDevicePhyIdByIndex(ctypes.c_uint32(index), ctypes.byref(old)) == 0:
            return old.value
    except (OSError, AttributeError):
        pass
    numbers = (visible or "").split(",")
    return int(numbers[index]) if index < len(numbers) and numbers[index].strip().isdecimal() else None


def _load(library: str) -> Any:
    return ctypes.CDLL(library)
