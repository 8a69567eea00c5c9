"""The transport "auto" for CUDA tensors: one-sided where the ranks reach each other's memory, else NCCL."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tokenring.backends.control.process_info import this_process
from tokenring.backends.control.store_gather import StoreGather
from tokenring.backends.interfaces import Landing, Transport
from tokenring.backends.transports import nccl, nvshmem, symmetric
from tokenring.backends.transports.auto import Preferring, choice_of
from tokenring.backends.transports.memory_trial import Broken
from tokenring.backends.transports.nccl import NcclTransport
from tokenring.backends.transports.symm import SymmTransport
from tokenring.errors import BackendUnavailable
from tokenring.lowering.target import Link, Target
from tokenring.tables.transport_choice import ONE_SIDED, TWO_SIDED, Domain, TransportChoice

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

LOG = logging.getLogger("tokenring")


class CudaTransport(Preferring):
    """A SymmTransport where `transport_choice` says so and it can be made, for as long as there is room; else NCCL.

    `why` says what was taken and why, the same on all ranks. Raises BackendUnavailable where neither can be had.
    """

    auto, kind = "auto", "cuda"
    target = SymmTransport.target
    one_sided: type[SymmTransport] = SymmTransport
    two_sided: type[NcclTransport] = NcclTransport

    def __init__(self, group: Held, timeout_seconds: float, message_bytes: int | None = None) -> None:
        self._links: dict[Link, None] = {}
        self._device: torch.device | None = None
        self._devices: tuple[str, ...] = ()  # of all ranks, where they have told each other
        super().__init__(group, timeout_seconds, message_bytes)

    def _first(self) -> Transport:
        chosen = self._choose()
        self.why = chosen.reason
        if chosen.transport is None:
            raise BackendUnavailable(f"transport 'auto' for CUDA tensors: {chosen.reason}")
        if chosen.transport == ONE_SIDED:
            try:
                made = self.one_sided(self._group, self._timeout_seconds)
                LOG.info("transport 'auto' takes %s: %s", ONE_SIDED, self.why)
                return made
            except BackendUnavailable as error:  # on all ranks alike
                self.why = f"{ONE_SIDED} cannot be used: {error}"
                if isinstance(error, Broken):
                    _broken()[self._devices] = str(error)
        LOG.warning("transport 'auto' takes %s: %s", TWO_SIDED, self.why)
        return self._second()

    def _second(self) -> Transport:
        return self.two_sided(self._group, self._timeout_seconds)

    def _target(self, now: Transport) -> Target:
        """Return what it can do, grouping as either: a program that was bound before it fell back goes on over NCCL."""
        return replace(super()._target(now), grouping=True)

    def _choose(self) -> TransportChoice:
        """Choose by the findings of all ranks, so that all choose the same."""
        meeting = StoreGather(self._group, self._timeout_seconds)
        found = survey(meeting)
        self._devices = found.devices
        return self._chosen(found.domain, found.unavailable, meeting.rank, meeting.world_size, meeting.gather)

    # ---------- as a transport

    def prepare(self, links: Iterable[Link], device: torch.device) -> None:
        """Connect these links and all before them on the transport in use; see Transport.prepare."""
        self._device = device
        self._links |= dict.fromkeys(links)
        self.now.prepare(self._links, device)

    def _own(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _fall_back(self, error: BackendUnavailable) -> None:
        super()._fall_back(error)
        if self._device is not None:
            self.now.prepare(self._links, self._device)

    def place(self, receives: Sequence[Landing]) -> object | None:
        """Send the places of a program's messages to the other ranks; see Transport.place."""
        return self.now.place(receives)

    def begin(self, placement: Any) -> None:
        """Begin the messages of the placed program; see Transport.begin."""
        self.now.begin(placement)

    def go(self) -> None:
        """Begin to move what was posted; see Transport.go."""
        self.now.go()

    def try_capture(self) -> None:
        """Try that messages go into graphs, on the transport in use; see Transport.try_capture."""
        self.now.try_capture()

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Gather a payload of every rank; see Transport.exchange."""
        return self.now.exchange(payload, what)

    def exchange_text(self, text: bytes, what: str) -> list[bytes]:
        """Gather a text of every rank; see Transport.exchange_text."""
        return self.now.exchange_text(text, what)


class Found(NamedTuple):
    """The findings of `survey`.

    domain: how the ranks reach each other's memory. unavailable: of each transport None, or why a rank cannot use it.
    devices: of all ranks.
    """

    domain: Domain
    unavailable: dict[str, str | None]
    devices: tuple[str, ...]


def survey(meeting: StoreGather) -> Found:
    """Find out, on all ranks together and alike, how they reach each other and which transports they can use."""
    said = [json.loads(each) for each in meeting.gather("their devices", json.dumps(_facts()))]
    devices = tuple(f"{each['boot_id']} {each['device']}" for each in said)
    mine = {"unreached": _unreached(said), "broken": _broken().get(devices)}
    seen = [json.loads(each) for each in meeting.gather("whom they reach", json.dumps(mine))]
    hosts = {each["boot_id"] for each in said}
    domain: Domain = "across" if len(hosts) > 1 else "apart" if any(each["unreached"] for each in seen) else "reached"
    found = {name: _first_reason(said, name) for name in (ONE_SIDED, TWO_SIDED)}
    if found[ONE_SIDED] is None:
        tried = next((each["broken"] for each in seen if each["broken"]), None)
        found[ONE_SIDED] = _same_number(said) or (f"found when it was tried before: {tried}" if tried else None)
    return Found(domain, found, devices)


@cache
def _broken() -> dict[tuple[str, ...], str]:
    """Return what trials have found wrong with memory in this process, by the devices of all ranks.

    It is kept no longer: what works is tried in milliseconds, and what does not may be mended before the next process.
    """
    return {}


def _facts() -> dict[str, Any]:
    """Return this rank's device and boot id, and why it cannot use each transport."""
    reasons = _automatic()
    found: dict[str, Any] = {"boot_id": this_process().boot_id, "device": None, "number": None}
    if not reasons[ONE_SIDED]:
        found |= {"device": _uuid(torch.cuda.current_device()), "number": torch.cuda.current_device()}
    return {**found, "overlaps": symmetric.may_overlap(os.environ), **reasons}


def _same_number(said: Sequence[dict[str, Any]]) -> str | None:
    """Say why torch's rendezvous would take two devices for one; None: it does not.

    It tells those of a host apart by their numbers.
    """
    owners: dict[tuple[Any, Any], tuple[int, Any]] = {}
    for rank, each in enumerate(said):
        if each["device"] is None:
            return None
        other, device = owners.setdefault((each["boot_id"], each["number"]), (rank, each["device"]))
        if device != each["device"] and not each["overlaps"]:
            return (
                f"ranks {other} and {rank} have different GPUs, each number {each['number']} in its process, and "
                f"torch's rendezvous takes them for one: let every process see all GPUs (CUDA_VISIBLE_DEVICES) and "
                f"choose its own by torch.cuda.set_device"
            )
    return None


def _unreached(said: Sequence[dict[str, Any]]) -> list[int]:
    """List the ranks whose device this process sees and cannot reach.

    What it does not see only the rendezvous can tell.
    """
    if any(each["device"] is None for each in said):
        return []
    own, seen = torch.cuda.current_device(), {_uuid(at): at for at in range(torch.cuda.device_count())}
    found = [(rank, seen.get(each["device"])) for rank, each in enumerate(said)]
    return [rank for rank, at in found if at not in (None, own) and not torch.cuda.can_device_access_peer(own, at)]


def unavailable() -> dict[str, str | None]:
    """Return, by transport for CUDA tensors, None or why this process cannot use it. Nothing is started."""
    return _automatic() | {"nvshmem": nvshmem.unavailable()}


def _automatic() -> dict[str, str | None]:
    """Return, by transport that "auto" chooses among, None or why this process cannot use it.

    NVSHMEM is not asked after: torch prints it where there is none.
    """
    return {ONE_SIDED: symmetric.unavailable(), TWO_SIDED: nccl.unavailable()}


def choice_here() -> tuple[str | None, str]:
    """Return the transport that ranks on all GPUs of this machine would take, and why.

    It goes by what this process sees of them.
    """
    reasons = _automatic()
    count = 0 if reasons[ONE_SIDED] else torch.cuda.device_count()
    apart = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    found = choice_of("cuda", "apart" if apart else "reached", reasons, count)
    where = f" (GPU {apart[0][0]} does not reach GPU {apart[0][1]})" if apart else ""
    return found.transport, f"{found.reason}{where}; nccl between machines"


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _first_reason(said: Sequence[dict[str, Any]], name: str) -> str | None:
    """Return why the first rank that cannot use a transport cannot; None: all can."""
    return next((f"rank {rank}: {each[name]}" for rank, each in enumerate(said) if each[name] is not None), None)
