"""Rates of computing on a rank: kernel calls, copies and merges, and the cost of a message beside its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import ATTENTION, Pass, TileOperator
from tokenring.lowering.footprint import flops_per_pair
from tokenring.lowering.target import Target
from tokenring.sequence.region import Patch
from tokenring.tables.launching import Launching

Sample = tuple[int, float]  # tokens on the shorter side of a square tile, TFLOP/s


@dataclass(frozen=True)
class Rates:
    """The rates of one device, one kernel and one dtype.

    forward, backward: TFLOP/s over visible pairs, by the shorter side of a tile, ascending; between two samples
        it is interpolated in the logarithms, beyond them it stays.
    call_seconds: of a kernel call, whatever its size. copy_gbs: bytes that a copy moves in a second, reads and
        writes together. op_seconds: of a copy or merge, whatever its size. merge_seconds: what merging results with
        their log-sum-exp takes more, where that is several operations (on a CPU), whatever the size.
    launching: how the host launches operators, where it may be slower than the device. Each of them costs op_seconds
        then, so call_seconds is the kernel's alone, and a merge no more than its operators. None: an instruction is
        one operation.
    source: where the figures are from; a guess says so.
    """

    source: str
    forward: tuple[Sample, ...]
    backward: tuple[Sample, ...]
    call_seconds: float = 0.0
    copy_gbs: float = math.inf
    op_seconds: float = 0.0
    merge_seconds: float = 0.0
    launching: Launching | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            samples = getattr(self, name)
            sides = [side for side, _ in samples]
            if not samples or sides != sorted(set(sides)) or any(not rate > 0 for _, rate in samples):
                raise ConfigurationError(
                    f"rates {self.source!r}: {name} is {samples!r}; give (tokens, TFLOP/s) with rising tokens"
                )

        if not (self.copy_gbs > 0 and min(self.call_seconds, self.op_seconds, self.merge_seconds) >= 0):
            raise ConfigurationError(f"rates {self.source!r}: copies need a rate above 0, costs must not be negative")

    def tflops(self, direction: Pass, side: int) -> float:
        """Return the TFLOP/s of a tile whose shorter side has `side` tokens."""
        samples = self.forward if direction == "forward" else self.backward
        return interpolate(samples, side)

    def kernel_seconds(
        self,
        patch: Patch,
        heads: int,
        head_dim: int,
        batch: int,
        direction: Pass,
        value_dim: int | None = None,
        operator: TileOperator = ATTENTION,
    ) -> float:
        """Return the seconds of one kernel call on a patch with `heads` query heads. value_dim None: as head_dim."""
        a_pair = flops_per_pair(direction, head_dim, head_dim if value_dim is None else value_dim, operator)
        flops = a_pair * batch * heads * self.pairs(patch)
        rate = self.tflops(direction, min(patch.rows, patch.cols))
        return self.call_seconds + flops / (rate * 1e12)

    def pairs(self, patch: Patch) -> float:
        """Return the pairs that a kernel takes the time of: those that are visible."""
        return patch.pairs()

    def copy_seconds(self, nbytes: float) -> float:
        """Return the seconds of a copy or merge that reads and writes `nbytes` bytes in all."""
        return self.op_seconds + nbytes / (self.copy_gbs * 1e9)

    def results_seconds(self, nbytes: float, merges: int) -> float:
        """Return the seconds of results that touch `nbytes` bytes: some merged by log-sum-exp, others copied, added."""
        return self.copy_seconds(nbytes) + merges * self.merge_seconds


def constant(tflops: float, source: str = "given", copy_gbs: float = math.inf) -> Rates:
    """Make rates that are equal for every tile, forward and backward: TFLOP/s, and GB/s of copies."""
    return Rates(source, ((1, tflops),), ((1, tflops),), copy_gbs=copy_gbs)


def interpolate(samples: Sequence[Sample], side: int) -> float:
    """Return the rate at a side, straight between neighbours in the logarithms of both."""
    if side <= samples[0][0]:
        return samples[0][1]
    for (low, slow), (high, fast) in pairwise(samples):
        if side <= high:
            share = math.log(side / low) / math.log(high / low)
            return slow * math.exp(share * math.log(fast / slow))
    return samples[-1][1]


@dataclass(frozen=True)
class Messages:
    """The costs that a transport adds to the time that bytes need.

    latency_seconds: from when both ends have posted to the first byte. post_seconds: of the rank that posts.
    flow_gbs: the most that one transfer gets. pair_serial: both directions with one peer share a queue in each
    channel; channels: 1 if requests and partials share it as well. source_serial: a rank sends one message after
    another in each channel, whatever the peer. pipelined: the latency passes while those before it in the queue are on
    their way (TCP), not after (operations on a stream). handling_seconds, handling_gbs: of the machine's cores for a
    message and its bytes, where ranks share them. window_bytes: they go as streams of packets (TCP), of which so much
    is on its way at most, and which queue at wires in the order in which they come, whatever flow_gbs and pair_serial
    say; None: all that pass a wire share it at every moment.
    """

    latency_seconds: float = 0.0
    post_seconds: float = 0.0
    flow_gbs: float = math.inf
    pair_serial: bool = False
    source_serial: bool = False
    pipelined: bool = False
    handling_seconds: float = 0.0
    handling_gbs: float = math.inf
    channels: int = 2
    window_bytes: float | None = None
    source: str = "ideal"


@dataclass(frozen=True)
class Machine:
    """The figures that the simulator needs beside the interconnect.

    shared_cores: where all ranks are processes of one machine, on how many cores they copy, merge and post in turns.
    kernels_share: whether kernels take turns there too; else they sleep, or something else than a core computes.
    start_seconds: until a rank's first instruction of a pass; ranks start one after another. transport: what moves
    messages there, where known. kernel: by name, what computes there, where its cuts of a patch are known; None: it
    takes any patch in one call.
    """

    rates: Rates
    messages: Messages = field(default_factory=Messages)
    shared_cores: float = math.inf
    kernels_share: bool = False
    start_seconds: float = 0.0
    transport: str | None = None
    kernel: str | None = None

    @cached_property
    def source(self) -> str:
        """The sources of the rates and of the messages' costs."""
        return f"{self.rates.source}; messages: {self.messages.source}"

    def kernel_seconds(self, of_ranks: Sequence[float]) -> float:
        """Return the least seconds that kernels take together, given the seconds on each rank.

        That is the longest of them; on cores that ranks share, also no less than their sum divided by the
        cores.
        """
        longest = max(of_ranks)
        return max(longest, sum(of_ranks) / self.shared_cores) if self.kernels_share else longest

    def over(self, target: Target) -> Machine:
        """Return this machine with messages in the queues of the target's transport."""
        messages = replace(
            self.messages, pair_serial=target.pair_serial, source_serial=target.batching, channels=target.channels
        )
        return replace(self, messages=messages)
