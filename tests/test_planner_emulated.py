"""Ranks that share the cores of one machine, as on emulated links: what their kernels take."""

from __future__ import annotations

import pytest
from nets import BOTH, call, named, workload

import tokenring as tr
from tokenring.emulate.shapes import Shape
from tokenring.planner.auto import call_bound
from tokenring.planner.emulated import computing_machine, interconnect_of_shape, sleeping_machine
from tokenring.planner.predict import Setting, least_seconds, predict
from tokenring.planner.rates import Machine, constant

RANKS, TFLOPS = 8, 0.05
RATES = constant(TFLOPS, "one core")
SIZE = workload(RANKS, (8, 8), 64)
ULYSSES = named("ulysses", RANKS, SIZE.q_length)


def on(machine: Machine) -> Setting:
    """On links so wide that kernels alone take time."""
    return Setting(SIZE, interconnect_of_shape(Shape("full-mesh", RANKS, 50.0)), machine, BOTH)


@pytest.mark.parametrize(("cores", "times"), [(1, 8), (2, 4), (8, 1), (32, 1)])
def test_kernels_of_more_ranks_than_cores_take_turns(cores: int, times: int) -> None:
    """Eight ranks that compute alike on two cores: each at a quarter of a core's rate, in every figure."""
    alone, shared = (predict(ULYSSES, on(computing_machine(RATES, RANKS, count))) for count in (RANKS, cores))
    assert shared.compute_seconds == pytest.approx(times * alone.compute_seconds)
    assert shared.seconds >= shared.compute_seconds
    least = least_seconds(ULYSSES, on(computing_machine(RATES, RANKS, cores)))
    assert least.kernel_seconds == pytest.approx(shared.compute_seconds)
    assert least.seconds <= shared.seconds


def test_kernels_that_sleep_take_none() -> None:
    one, many = (predict(ULYSSES, on(sleeping_machine(TFLOPS, RANKS, cores))) for cores in (1, RANKS))
    assert one.compute_seconds == many.compute_seconds


def test_the_bound_knows_how_many_cores_there_are() -> None:
    """No schedule computes faster than all cores together."""
    machines = (computing_machine(RATES, RANKS, 2), computing_machine(RATES, RANKS, RANKS))
    shared, alone = (call_bound(call(on(machine), tr.Full(), "contiguous")) for machine in machines)
    assert shared.compute_seconds == pytest.approx(4 * alone.compute_seconds)
    assert shared.compute_seconds <= predict(ULYSSES, on(machines[0])).compute_seconds * (1 + 1e-9)
