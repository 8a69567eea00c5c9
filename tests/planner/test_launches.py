"""Launches: counted on the emulated NPU, and what the planner prices. They are equal, instruction by instruction."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from ascend.launches import launched
from ascend.operators import register
from ascend.ranks import NpuPools
from ranks import Here

from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.ir.schedule_data import PASSES, ScheduleData
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.lower import lower
from tokenring.lowering.records import Records
from tokenring.planner.simulation.launches import Launches, PassRecords
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import parse_mask
from tokenring.sequence.workload import Workload
from tokenring.tables.launching import KERNELS

WHEEL = "2.9.1"
BF16, FP32 = torch.bfloat16, torch.float32


class Call(NamedTuple):
    """A schedule, and what it is called with."""

    name: str
    ranks: int = 8
    heads: tuple[int, int] = (8, 2)
    layout: str = "zigzag"
    mask: str = "causal"
    batch: int = 1
    dtype: torch.dtype = BF16

    def schedule(self) -> ScheduleData:
        layout = make_layout(self.layout, self.ranks, 32 * self.ranks)
        return make_schedule(self.name, layout, layout, parse_mask(self.mask))

    def size(self) -> Workload:
        tokens = 32 * self.ranks
        return Workload(self.batch, tokens, tokens, *self.heads, 64, self.dtype)


CALLS = (
    Call("ring"), Call("direct-kv"), Call("tokenring"), Call("usp/2"), Call("ulysses", 4, (8, 4)),
    Call("direct-q"), Call("double-ring/4"), Call("bidirectional", 4), Call("tokenring/keep", 4),
    Call("ring", 4, layout="contiguous", mask="full"), Call("ring", 4, batch=2), Call("tokenring", 4, batch=2),
    Call("ulysses", 4, (8, 4), batch=2), Call("direct-kv/pieces2", 4), Call("mesh-kv/2x2", 4), Call("tiles/2x2", 4),
)  # fmt: skip
Counted = dict[str, list[tuple[str, int]]]


def counted(here: Here, call: Call, rank: int) -> Counted:
    """What a rank's instructions launch on the emulated NPU; the last: after them."""
    register(WHEEL)
    found = launched(call.schedule(), call.size(), rank, NpuFusion(), transport_target("hccl"))
    return {each: [(str(what), count.total()) for what, count in found[each]] for each in PASSES}


def priced(call: Call, rank: int) -> Counted:
    """What the planner takes them to launch."""
    schedule, size = call.schedule(), call.size()
    found = {}
    for each in PASSES:
        program = lower(schedule, rank, each, size, transport_target("hccl"), NpuFusion.supports_patch)
        records = PassRecords(schedule, Records(schedule, size, each))
        launches = Launches(program, records, KERNELS["npu-fusion"])
        whole = [(str(what), launches.of(what)) for what in program.instructions]
        found[each] = [*whole, ("None", launches.after())]
    return found


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_counted_and_priced_are_equal(call: Call, npus: NpuPools) -> None:
    for rank in range(call.ranks):
        (found,) = npus(1)(counted, call, rank)
        assert priced(call, rank) == found
