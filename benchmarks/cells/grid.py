"""The cells: what is raced where. A pairwise sample, so that any two values of any two factors meet."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from pairwise import sample

from tokenring.emulate.shapes import Shape
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.footprint import FLOPS_PER_PAIR
from tokenring.lowering.target import Target
from tokenring.planner.bounds.mask_density import visible_pairs
from tokenring.planner.choosing.auto import CallToPlan, make, plan_call
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.interconnects.emulated import interconnect_of_shape, sleeping_machine
from tokenring.planner.simulation.predict import Setting, busiest, predict
from tokenring.sequence.layout import Layout, make_layout
from tokenring.sequence.mask import Mask, parse_mask
from tokenring.sequence.workload import Workload

LEAST_CELLS = 48
TARGETS = (  # beside the sample: what auto has to gain over a KV ring where that is asked for
    ("full-mesh", 8, "6:6", "full", "forward", "communication"),
    ("switch", 8, "8:8", "full", "forward", "communication"),
    ("switch", 8, "6:6", "full", "forward", "communication"),
    ("two-node", 8, "8:8", "full", "forward", "communication"),
    # Lengths that seven pieces divide: the only ones with rings over all the links of eight ranks (TASP).
    ("full-mesh", 8, "8:8", "full", "forward", "sevenths"),
    ("full-mesh", 8, "6:6", "full", "forward", "sevenths"),
    ("full-mesh", 8, "8:2", "causal", "forward+backward", "sevenths"),
)
HEAD_DIM = 64
LINK_GBIT = 0.05  # at which links decide, not two cores; of a full mesh see link_gbit
SMALL_LINK_GBIT = 0.02  # where messages are small
UPLINK_SHARE = 0.25  # of a link, for all of a node
TOKENS = {  # a rank; so that blocks of KV take 15 ms or more
    4: {"8:8": 128, "6:6": 128, "8:2": 192, "8:1": 256},
    8: {"8:8": 96, "6:6": 96, "8:2": 128, "8:1": 192},
}
SMALL_TOKENS = 16  # a rank: messages of at most 64 KB
SEVENTHS_TOKENS = 112  # a rank
WIRE_OVER_COMPUTE = {  # of the best schedule
    "communication": 5.0, "sevenths": 5.0, "balanced": 1.1, "latency": 5.0,
}  # fmt: skip
FACTORS = {
    "topology": ("full-mesh", "switch", "ring", "pcie-tree", "two-node-nics", "two-node"),
    "ranks": (4, 8),
    "heads": ("8:8", "6:6", "8:2", "8:1"),
    "mask": ("full", "causal"),
    "passes": ("forward", "forward+backward"),
    "regime": ("communication", "balanced", "latency"),
}
NO_COMPUTE_TFLOPS = 1e6


CORES = 2.0  # of the machine on which the cells were measured, which all ranks share


def link_gbit(topology: str, ranks: int, port_gbit: float) -> float:
    """Of each link. A rank's links in a full mesh carry together what a port does: calls take as long as elsewhere."""
    return round(port_gbit / (ranks - 1), 4) if topology == "full-mesh" else port_gbit


def deepspeeds(kv_heads: int, ranks: int) -> str | None:
    """What DeepSpeed has for heads that the ranks do not divide, if there are more of them than ranks."""
    return f"uneven/{kv_heads}" if kv_heads > ranks and kv_heads % ranks else None


@dataclass(frozen=True)
class Cell:
    """One cell. `name` is its key in the results."""

    topology: str
    ranks: int
    heads: str
    mask: str
    passes: str
    regime: str

    @property
    def name(self) -> str:
        return " ".join(str(value) for value in asdict(self).values())

    @property
    def shape(self) -> Shape:
        port = SMALL_LINK_GBIT if self.regime == "latency" else LINK_GBIT
        link = link_gbit(self.topology, self.ranks, port)
        if not self.topology.startswith("two-node"):
            return Shape(self.topology, self.ranks, link)
        own = self.topology == "two-node-nics"
        return Shape("two-node", self.ranks, link, link * UPLINK_SHARE, nic_per_rank=own)

    @property
    def directions(self) -> tuple[Pass, ...]:
        return PASSES if self.passes == "forward+backward" else PASSES[:1]

    @property
    def workload(self) -> Workload:
        q_heads, kv_heads = map(int, self.heads.split(":"))
        other = {"latency": SMALL_TOKENS, "sevenths": SEVENTHS_TOKENS}
        tokens = other.get(self.regime, TOKENS[self.ranks][self.heads])
        length = tokens * self.ranks
        return Workload(1, length, length, q_heads, kv_heads, HEAD_DIM, torch.float32)

    @property
    def the_mask(self) -> Mask:
        return parse_mask(self.mask)

    @property
    def layout(self) -> Layout:
        name = "zigzag" if self.mask == "causal" else "contiguous"
        return make_layout(name, self.ranks, self.workload.q_length)

    @cached_property
    def tflops(self) -> float:
        """Of each rank, so that the best schedule's busiest wire needs so many times the kernels' time."""
        size = self.workload
        pairs = visible_pairs(self.the_mask, size.q_length, size.kv_length)
        a_pair = sum(FLOPS_PER_PAIR[direction] for direction in self.directions) * size.q_heads * size.head_dim
        call = self.call(NO_COMPUTE_TFLOPS)
        wires = busiest(plan_call(call).schedule, call.setting)
        seconds = wires.seconds / WIRE_OVER_COMPUTE[self.regime]
        return float(f"{a_pair * pairs / self.ranks / seconds / 1e12:.3g}")

    @property
    def call_seconds(self) -> float:
        """Return the seconds of each call of a kernel, beside what it computes."""
        return 0.0

    @property
    def target(self) -> Target:
        """Of what moves its messages."""
        return transport_target("gloo")

    def call(self, tflops: float | None = None, everything: bool = False, target: Target | None = None) -> CallToPlan:
        """What is planned for, with the figures of the emulation; target: of its transport, if not as it is now."""
        rate = self.tflops if tflops is None else tflops
        machine = sleeping_machine(rate, self.shape, CORES, self.call_seconds)
        net = interconnect_of_shape(self.shape)
        setting = Setting(self.workload, net, machine, self.directions, target=target or self.target)
        return CallToPlan(setting, self.layout, self.layout, self.the_mask, everything=everything)

    def plan(self, tflops: float | None = None, target: Target | None = None) -> Plan:
        """Every schedule that fits, simulated; tflops: of the kernels, if not those that the cell asks for."""
        return plan_call(self.call(tflops, everything=True, target=target))

    def seconds(self, schedule: str, tflops: float, target: Target) -> float:
        """What one schedule is predicted to take."""
        call = self.call(tflops, target=target)
        return predict(make(call, schedule), call.setting).seconds


def cells() -> list[Cell]:
    """The sample, grouped so that an emulation is set up once for all its cells."""
    rows = [Cell(*row) for row in (*sample(FACTORS, LEAST_CELLS, ("topology", "heads", "regime")), *TARGETS)]
    return sorted(dict.fromkeys(rows), key=lambda cell: (cell.topology, cell.ranks, cell.shape.link_gbit, cell.name))
