"""Ranks that share the cores of one machine, as on emulated links: what their kernels take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nets import BOTH, call, named, workload

import tokenring as tr
from tokenring.emulate.plan import packet_bytes
from tokenring.emulate.shapes import Shape
from tokenring.planner.choosing.auto import call_bound
from tokenring.planner.interconnects.emulated import (
    OVERHEADS,
    computing_machine,
    interconnect_of_shape,
    sleeping_machine,
)
from tokenring.planner.simulation.predict import Setting, least_seconds, predict
from tokenring.tables.rates import Machine, constant

RANKS, TFLOPS = 8, 0.05
WIDE = Shape("full-mesh", RANKS, 50.0)  # on whose links nothing takes time
RATES = constant(TFLOPS, "one core")
SIZE = workload(RANKS, (8, 8), 64)
ULYSSES = named("ulysses", RANKS, SIZE.q_length)


def on(machine: Machine) -> Setting:
    """On links so wide that kernels alone take time."""
    return Setting(SIZE, interconnect_of_shape(WIDE), machine, BOTH)


@pytest.mark.parametrize(("cores", "times"), [(1, 8), (2, 4), (8, 1), (32, 1)])
def test_kernels_of_more_ranks_than_cores_take_turns(cores: int, times: int) -> None:
    """Eight ranks that compute alike on two cores: each at a quarter of a core's rate, in every figure."""
    alone, shared = (predict(ULYSSES, on(computing_machine(RATES, WIDE, count))) for count in (RANKS, cores))
    assert shared.compute_seconds == pytest.approx(times * alone.compute_seconds)
    assert shared.seconds >= shared.compute_seconds
    least = least_seconds(ULYSSES, on(computing_machine(RATES, WIDE, cores)))
    assert least.kernel_seconds == pytest.approx(shared.compute_seconds)
    assert least.seconds <= shared.seconds


def test_kernels_that_sleep_take_none() -> None:
    one, many = (predict(ULYSSES, on(sleeping_machine(TFLOPS, WIDE, cores))) for cores in (1, RANKS))
    assert one.compute_seconds == many.compute_seconds


def test_the_bound_knows_how_many_cores_there_are() -> None:
    """No schedule computes faster than all cores together."""
    machines = (computing_machine(RATES, WIDE, 2), computing_machine(RATES, WIDE, RANKS))
    shared, alone = (call_bound(call(on(machine), tr.Full(), "contiguous")) for machine in machines)
    assert shared.compute_seconds == pytest.approx(4 * alone.compute_seconds)
    assert shared.compute_seconds <= predict(ULYSSES, on(machines[0])).compute_seconds * (1 + 1e-9)


def test_small_packets_take_cores() -> None:
    """Slow links have small packets, of which more must be handled for as many bytes."""
    slow, wide = (OVERHEADS.messages(Shape("switch", RANKS, gbit)) for gbit in (0.02, 50.0))
    assert 1 / slow.handling_gbs > 2 / wide.handling_gbs
    a_packet = OVERHEADS.packet / packet_bytes(Shape("switch", RANKS, 0.02).fabric)
    assert 1e-9 / slow.handling_gbs == pytest.approx(1e-9 / OVERHEADS.handling_gbs + a_packet)
    assert slow == replace(wide, handling_gbs=slow.handling_gbs)
