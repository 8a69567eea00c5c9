"""What a task gets: its rank, its device, groups, and a clock that waits for all ranks and for the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tokenring.backends.devices import DeviceRuntime, device_of

GROUP_SECONDS = 120.0
ROUNDS, WARM_UP = 5, 2


@dataclass(frozen=True)
class Sizes:
    """Of messages in bytes, and of attention calls: tokens of all ranks, heads, head dim."""

    message_bytes: int
    check: tuple[int, int, int]
    timed: tuple[int, int, int]


# On NPUs what fills a link; elsewhere what shows that it runs.
ON_NPU = Sizes(64 << 20, (256, 4, 64), (4096, 16, 128))
DRY = Sizes(64 << 10, (32, 4, 16), (64, 4, 16))


@dataclass
class Here:
    """One rank. kind: "npu" or "cpu"; emulated: the device is not real, its times mean nothing."""

    rank: int
    ranks: int
    kind: str
    emulated: bool
    say: Callable[[str], None]
    _groups: dict[str, Any] = field(default_factory=dict)
    _met: set[tuple[int, int, str]] = field(default_factory=set)

    @property
    def sizes(self) -> Sizes:
        return DRY if self.emulated or self.kind == "cpu" else ON_NPU

    @property
    def place(self) -> torch.device:
        return torch.device(self.kind, self.rank % self.device_count) if self.kind != "cpu" else torch.device("cpu")

    @property
    def device_count(self) -> int:
        return int(getattr(torch, self.kind).device_count())

    @property
    def device(self) -> DeviceRuntime:
        return device_of(self.place)

    @property
    def backend(self) -> str:
        return "hccl" if self.kind == "npu" else "gloo"

    def group(self, name: str) -> Any:
        """A group of all ranks for a task, made at first use: by all ranks, in one order."""
        if name not in self._groups:
            self._groups[name] = dist.new_group(backend=self.backend, timeout=timedelta(seconds=GROUP_SECONDS))
        return self._groups[name]

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.place)

    def meet(self) -> None:
        """All ranks get here, by way of the CPU."""
        dist.all_reduce(torch.zeros(1))

    def slowest(self, seconds: float) -> float:
        found = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def timed(self, call: Callable[[], object] | None, rounds: int = ROUNDS) -> float:
        """Seconds of a call on the slowest rank: the median of so many rounds. None: nothing to do on this rank."""
        times = []
        for turn in range(WARM_UP + rounds):
            self.meet()
            began = self.device.clock()
            if call is not None:
                call()
            seconds = self.slowest(self.device.clock() - began)
            if turn >= WARM_UP:
                times.append(seconds)
        return sorted(times)[len(times) // 2]

    def warm_up(self, groups: Sequence[str], pairs: Sequence[tuple[int, int]] | None = None) -> None:
        """The first message of these pairs (None: of all), in rounds of a tournament: so nobody waits in a circle."""
        from tokenring.backends.transports.hccl import warm_up_order

        if pairs is None:
            pairs = [(low, high) for low in range(self.ranks) for high in range(low + 1, self.ranks)]
        for name in groups:
            self.group(name)
        wanted = {(low, high, name) for name in groups for low, high in pairs} - self._met
        self._met |= wanted
        for low, high, name in warm_up_order(wanted, self.ranks):
            if self.rank in (low, high):
                peer = high if self.rank == low else low
                self.message(self.buffer(1), peer, self.rank == low, name).wait()

    def message(self, data: torch.Tensor, peer: int, sends: bool, group: str) -> Any:
        """The work of a message with a peer."""
        post = dist.isend if sends else dist.irecv
        return post(data, peer, group=self.group(group))

    def attention(self) -> Callable[[], object]:
        """A call of the local kernel."""
        from tokenring.backends.registry import make_kernel
        from tokenring.sequence.region import Patch

        tokens, heads, dim = self.sizes.timed
        dtype = torch.float32 if self.emulated or self.kind == "cpu" else torch.bfloat16
        q, k, v = (torch.randn(1, heads, tokens, dim, dtype=dtype, device=self.place) for _ in range(3))
        kernel = make_kernel("auto", self.place)
        return partial(kernel.forward, q, k, v, patch=Patch(0, tokens, 0, tokens), scale=dim**-0.5)


def wait_all(works: Sequence[Any]) -> None:
    for each in works:
        each.wait()


def pair_buffer_bytes() -> int:
    """What a pair's communicator is reckoned to take."""
    return 2 * int(os.environ.get("P2P_HCCL_BUFFSIZE", "20")) << 20
