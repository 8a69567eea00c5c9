"""Emulated links as the planner sees them: the same wires and ways, and what processes on one machine add to them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from tokenring.emulate.plan import burst_bytes, packet_bytes
from tokenring.emulate.shapes import Shape
from tokenring.emulate.ways import ways, wires
from tokenring.planner.interconnects.interconnect import Interconnect, LinkFabric, of_one_host
from tokenring.tables.rates import Machine, Messages, Rates, constant

BITS_OF_A_BYTE = 8


@dataclass(frozen=True)
class Overheads:
    """Overheads of processes that share a machine's cores, beside links and kernels; seconds on a core, if not said.

    latency: that a message waits (not on a core); post: of each end of a message; handling: of a message, its
    handling_gbs, and packet: of each of its packets; operation: of a copy or merge, and its copy_gbs; merge: what
    merging results takes more; call: of a kernel; start: of a pass, for each rank. window_bytes: of a connection, on
    their way at once: between TCP's first ten segments and what the emulation's sockets take.
    """

    latency: float = 0.496e-3
    post: float = 0.025e-3
    handling: float = 0.06e-3
    handling_gbs: float = 1.78
    packet: float = 3.13e-6
    operation: float = 0.0466e-3
    copy_gbs: float = 10.8
    merge: float = 0.0635e-3
    call: float = 0.189e-3
    start: float = 0.8e-3
    window_bytes: float = 35100.0

    def messages(self, shape: Shape) -> Messages:
        """Return message costs on emulated links of this shape, whose packets are the smaller the slower its links."""
        byte_seconds = 1e-9 / self.handling_gbs + self.packet / packet_bytes(shape.fabric)
        return Messages(
            self.latency, self.post, pipelined=True, handling_seconds=self.handling, handling_gbs=1e-9 / byte_seconds,
            window_bytes=self.window_bytes, source="Gloo between namespaces",
        )  # fmt: skip


# What benchmarks/cells/calibrate.py printed on two cores of an AMD EPYC, where links and kernels take no time, and
# over shaped links; taken for any machine.
OVERHEADS = Overheads()


def interconnect_of_shape(shape: Shape, machine: Machine | None = None) -> Interconnect:
    """Return the interconnect of an emulated shape; machine: what its ranks compute with."""
    fabric = shape.fabric
    packet, gbits = packet_bytes(fabric), wires(fabric)
    gbs = {name: gbit / BITS_OF_A_BYTE for name, gbit in gbits.items()}
    bursts = {name: float(burst_bytes(gbit, packet)) for name, gbit in gbits.items()}
    net = of_one_host(str(shape), LinkFabric(shape.ranks, ways(fabric), gbs, burst_bytes=bursts))
    return net if machine is None else replace(net, machine=machine)


def sleeping_machine(
    tflops: float, shape: Shape, cores: float | None = None, call_seconds: float = 0.0
) -> Machine:
    """Return a machine of kernels that sleep (`tokenring bench --compute`).

    Their own time is part of the sleep: they need no core. call_seconds: that each call sleeps beside.
    """
    rates = constant(tflops, "sleeping kernels", OVERHEADS.copy_gbs)
    machine = computing_machine(rates, shape, cores)
    return replace(machine, rates=replace(machine.rates, call_seconds=call_seconds), kernels_share=False)


def computing_machine(rates: Rates, shape: Shape, cores: float | None = None) -> Machine:
    """Return a machine of kernels that compute, on the cores that all ranks share: so many, or all of this machine.

    Rates: of one core that has nothing else to do; what is done around a kernel takes as long as around a copy.
    """
    shared = float(os.cpu_count() or 1) if cores is None else cores
    call = rates.call_seconds + OVERHEADS.operation
    operation, merge = max(rates.op_seconds, OVERHEADS.operation), max(rates.merge_seconds, OVERHEADS.merge)
    rates = replace(rates, call_seconds=call, op_seconds=operation, merge_seconds=merge)
    return Machine(rates, OVERHEADS.messages(shape), shared, kernels_share=True, start_seconds=OVERHEADS.start)
