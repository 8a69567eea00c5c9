"""One rank of `tokenring rates --transports`: python -m tokenring.cli.rates.transports_worker CASE, by torchrun."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from statistics import quantiles
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tokenring.backends.control.store_gather import StoreGather
from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import Transport
from tokenring.backends.registry import make_transport
from tokenring.backends.table_keys import transfers_key
from tokenring.errors import BackendUnavailable, one_line
from tokenring.ir.schedule_data import REQUESTS
from tokenring.launch.command import Tell, process_group, quiet, serve
from tokenring.runtime.pool import Pool
from tokenring.tables.transport_choice import PAIRS, Domain, size_text
from tokenring.tables.transport_times import Sample, Transfers, TransportKey, from_json, to_json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WAIT_SECONDS = 60.0  # for another rank
SIZES = tuple(4**power << 12 for power in range(8))  # bytes of a message: 4 KB to 64 MB
ROUNDS = 9  # of each transport in turn
ROUND_SECONDS, MOST_STEPS = 0.02, 50  # in a row between two readings of the clock, as in schedules


@dataclass(frozen=True)
class TransportCase:
    """The measurement that ranks are asked for. seconds: no larger messages once a step takes this long."""

    kind: str
    seconds: float


@dataclass(frozen=True)
class TransportMeasured:
    """The result of a measurement, at rank 0. left_out: why each transport that cannot be used was left out."""

    key: TransportKey
    transfers: Transfers
    left_out: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the result as JSON."""
        return json.dumps([to_json(self.key, self.transfers), self.left_out])

    @staticmethod
    def from_json(text: str) -> TransportMeasured:
        """Read the result that to_json wrote."""
        document, left_out = json.loads(text)
        return TransportMeasured(*from_json(document), left_out)


def main(argv: list[str]) -> int:
    """Run this rank; return the exit code."""
    return serve(partial(run, TransportCase(**json.loads(argv[0]))))


def run(case: TransportCase, tell: Tell) -> TransportMeasured | None:
    """Run the measurement on the processes that torchrun has started; return the result at rank 0, None elsewhere."""
    torch.set_num_threads(1)
    with process_group(WAIT_SECONDS):
        assert dist.group.WORLD is not None
        return measure(dist.group.WORLD, case, tell if dist.get_rank() == 0 else quiet)


def measure(group: ProcessGroup, case: TransportCase, tell: Tell = quiet) -> TransportMeasured | None:
    """Measure the seconds of a ring's step over each transport that "auto" may choose; return the result at rank 0.

    All ranks call it together.
    """
    device = _own_device(case.kind)
    made: dict[str, Transport] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        for name in PAIRS[case.kind]:
            try:
                made[name] = stack.enter_context(closing(make_transport(name, group, WAIT_SECONDS)))
            except BackendUnavailable as error:  # on all ranks alike
                left_out[name] = one_line(error)
        samples = samples_of(made, device, case.seconds, tell)
    domain = _domain(case.kind, group, left_out)
    if dist.get_rank(group):
        return None
    return TransportMeasured(transfers_key(case.kind, domain, dist.get_world_size(group)), Transfers(samples), left_out)


def _own_device(kind: str) -> torch.device:
    """Make this rank's device the current one and return it: the only one it sees, or the one of its local rank."""
    if kind == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind)
    index = int(os.environ.get("LOCAL_RANK", "0")) % module.device_count()
    module.set_device(index)
    return torch.device(kind, index)


def _domain(kind: str, group: ProcessGroup, left_out: Mapping[str, str]) -> Domain:
    if kind == "cpu":
        return "across" if PAIRS[kind][0] in left_out else "reached"
    from tokenring.backends.transports.auto_cuda import survey

    return survey(StoreGather(group, WAIT_SECONDS)).domain


def samples_of(
    transports: Mapping[str, Transport], device: torch.device, limit_seconds: float, tell: Tell = quiet
) -> dict[str, tuple[Sample, ...]]:
    """Return samples of each transport, whose rounds alternate: what disturbs one disturbs the other as well."""
    steps = {name: _Step(transport, device) for name, transport in transports.items()}
    found: dict[str, list[Sample]] = {name: [] for name in steps}
    for at, nbytes in enumerate(SIZES):
        tell(at, len(SIZES), f"messages of {size_text(nbytes)}")
        for each in steps.values():
            each.prepare(nbytes)
        rounds = [{name: each.seconds() for name, each in steps.items()} for _ in range(ROUNDS)]
        for name in steps:
            found[name].append(Sample(nbytes, *quantiles([each[name] for each in rounds], n=4, method="inclusive")))
        if 4 * max((each[-1].median for each in found.values()), default=math.inf) > limit_seconds:
            break  # the next size would take longer
    return {name: tuple(each) for name, each in found.items()}


class _Step:
    """A ring's step over one transport: each rank sends to the next one, and gets as much from the one before."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport, self._device = transport, device
        rank, ranks = transport.rank, transport.world_size
        self._before, self._after = (rank - 1) % ranks, (rank + 1) % ranks
        self._pool, self._clock = Pool.of(transport, device), device_of(device).clock
        transport.prepare([(each, (each + 1) % ranks, REQUESTS) for each in range(ranks)], device)

    def prepare(self, nbytes: int) -> None:
        """Allocate memory for such messages, and set how many steps make a round, after some that are not counted."""
        self._pool.reserve(nbytes)
        self._into = self._pool.data[:nbytes]
        self._data = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._bind(2)
        self.seconds()
        self._bind(max(2, min(MOST_STEPS, round(ROUND_SECONDS / self.seconds()))))
        self.seconds()

    def _bind(self, steps: int) -> None:
        """Make so many steps one program, and send the other ranks its places where the transport asks for that."""
        self._steps, transport = steps, self._transport
        if transport.target.placing:
            self._placement = transport.place([(self._before, REQUESTS, self._into)] * steps)

    def seconds(self) -> float:
        """Return the seconds of a step, over as many as are bound: the slowest rank's, so that all return the same."""
        transport = self._transport
        transport.exchange(b"", "the start of a round")
        began = self._clock()
        if transport.target.placing:
            transport.begin(self._placement)
        for _ in range(self._steps):
            handles = [
                transport.recv(self._into, self._before, REQUESTS, "measuring"),
                transport.send(self._data, self._after, REQUESTS, "measuring"),
            ]
            if transport.target.grouping:
                transport.go()
            for each in handles:
                each.wait()
        taken = (self._clock() - began) / self._steps
        heard = transport.exchange(struct.pack("d", taken), "what it took")
        return max(float(struct.unpack("d", each)[0]) for each in heard)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
