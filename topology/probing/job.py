"""The topology of a group: each rank gives its seat, one of each machine looks at it, all get one graph."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from tokenring.errors import ConfigurationError, TokenRingError, TopologyError
from tokenring.tables.kept_files import cache_folder
from tokenring.topology.model.facts import Device, Facts, Note, SourceOrigin
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.model.schema import from_json, to_json
from tokenring.topology.probing.cache import cached, fingerprint
from tokenring.topology.probing.device_identity import Seat, host_names, this_seat
from tokenring.topology.probing.nvml import read_nvml
from tokenring.topology.probing.probe import NoAnswer, run_command
from tokenring.topology.probing.probe import probe as probe_here

if TYPE_CHECKING:
    import torch

    from tokenring.launch.groups import Group, Held, HeldGroup

SHARE_OF_TIME, MOST_TOOL_SECONDS = 0.5, 30.0  # what asking the tools may take of the limit: the others wait meanwhile
Look = Callable[[], list[Facts]]


class Digested(Protocol):
    """A topology that ranks can compare: equal digests are equal topologies."""

    @property
    def digest(self) -> str:
        """The hash that ranks compare."""


T = TypeVar("T", bound=Digested)
Seated = Callable[[Graph, Sequence[Seat], Sequence[str]], T]  # a topology: of a graph, ranks' seats, ranks' hosts


def probe(
    group: Group | HeldGroup,
    device: torch.device | None,
    seated: Seated[T],
    *,
    cache: bool,
    timeout_seconds: float,
) -> T:
    """Probe the topology of a group; see Topology.probe."""
    from tokenring.launch.groups import hold

    held = hold(group)
    del group
    seat = this_seat(device)

    def look() -> list[Facts]:
        return _ask_tools(min(SHARE_OF_TIME * timeout_seconds, MOST_TOOL_SECONDS))

    def look_or_remember() -> list[Facts]:
        return cached(cache_folder(os.environ) if cache else None, seat.host, fingerprint(seat.host), look)

    return gather(held, seat, look_or_remember, timeout_seconds, seated)


def gather(group: Held | None, seat: Seat, look: Look, timeout_seconds: float, seated: Seated[T]) -> T:
    """Gather the topology of all ranks' seats; `look` is called by the first rank of each machine.

    Raises PeerLost, which names who did not come; TopologyError if a machine could not be looked at;
    ConfigurationError if ranks make different topologies of equal facts.
    """
    if group is None:
        return _assembled([seat], {0: _said(look)}, seated)

    from tokenring.backends.control.store_gather import StoreGather

    meeting = StoreGather(group, timeout_seconds)
    seats = [Seat.from_text(text) for text in meeting.gather("where they sit", seat.to_text())]
    speakers = _speakers(host_names(seats))
    texts = meeting.gather("what their machines are", _said(look) if meeting.rank in speakers else "")
    topology = _assembled(seats, {rank: texts[rank] for rank in speakers}, seated)
    digests = meeting.gather("what they make of it", topology.digest)
    if len(set(digests)) > 1:
        odd = next(rank for rank, each in enumerate(digests) if each != digests[0])
        raise ConfigurationError(
            f"rank {odd} makes another topology of the same facts than rank 0: install one version of tokenring "
            f"on all machines"
        )
    return topology


def _speakers(hosts: Sequence[str]) -> list[int]:
    """Return the first rank of each host."""
    return [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]


def _said(look: Look) -> str:
    """Return a rank's message about its machine: the facts, or why there are none, so that nobody waits in vain."""
    try:
        return to_json(look())
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _assembled(seats: Sequence[Seat], said: dict[int, str], seated: Seated[T]) -> T:
    hosts = host_names(seats)
    facts = [each for rank, text in said.items() for each in _heard(rank, hosts[rank], text)]
    return seated(merge(facts), seats, hosts)


def _heard(rank: int, host: str, text: str) -> list[Facts]:
    """Return one machine's facts, with its name; the machine itself is a device, so that one without any is there."""
    if text.startswith('{"error"'):
        raise TopologyError(f"rank {rank} could not look at {host}: {json.loads(text)['error']}")
    try:
        facts = from_json(text, f"rank {rank}")
    except TokenRingError as error:
        raise TopologyError(f"rank {rank} says of {host} what cannot be read: {error}") from None
    origin = SourceOrigin("this job", host=host)
    itself = Facts("devices", (Device("host", "host", name=host, host=host),), origin=origin)
    return [itself, *(_of_host(each, host) for each in facts)]


def _of_host(facts: Facts, host: str) -> Facts:
    """Return facts whose devices and notes name their host."""
    devices = tuple(replace(each, host=host) for each in facts.devices)
    notes = tuple(Note(f"{host}: {note}") for note in facts.notes)
    return replace(facts, devices=devices, notes=notes)


def _ask_tools(seconds: float) -> list[Facts]:
    """Probe this machine, and ask no further tool once `seconds` have passed."""
    deadline = time.monotonic() + seconds

    def run(command: tuple[str, ...]) -> str:
        if time.monotonic() > deadline:
            raise NoAnswer(f"not asked: others took more than {seconds:g} s")
        return run_command(command)

    return probe_here(run, nvml=read_nvml)
