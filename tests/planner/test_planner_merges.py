"""What merging results costs beside copies: several operations on a CPU, one on an accelerator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from families import make

from tokenring import Full
from tokenring.emulate.shapes import Shape
from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import Pass
from tokenring.lowering.lower import lower
from tokenring.planner.interconnects.emulated import OVERHEADS, computing_machine, sleeping_machine
from tokenring.planner.simulation.operations import Compute, operations
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import constant

RANKS = 4
SHAPE = Shape("switch", RANKS, 1.0)
SIZE = Workload(1, 64, 64, 4, 4, 8)


def merged_seconds(name: str, direction: Pass) -> float:
    """What merges add on rank 0, at a second each."""
    program = lower(schedule := make(name, RANKS, "contiguous", Full(), SIZE.q_length), 0, direction, SIZE)
    some, more = (
        sum(each.seconds for each in operations(schedule, SIZE, program, rates) if isinstance(each, Compute))
        for rates in (RATES, replace(RATES, merge_seconds=1.0))
    )
    return more - some


RATES = constant(1.0)


@pytest.mark.parametrize(
    ("name", "merges"),
    [
        ("ring", 3),  # the second to fourth block into the result of the first
        ("tokenring", 3),  # the results that come home
        ("direct-q", 3),
        ("direct-kv/pieces1", 1),  # all that has come, in one call, into the result of the own block
        ("ulysses", 0),  # heads come home whole
    ],
)
def test_of_forward(name: str, merges: int) -> None:
    assert merged_seconds(name, "forward") == pytest.approx(merges)


def test_gradients_are_added() -> None:
    assert merged_seconds("ring", "backward") == pytest.approx(0.0)


def test_on_emulated_links() -> None:
    """Kernels that sleep or compute: merges are real in both, and never cheaper than they were measured."""
    for machine in (sleeping_machine(1.0, SHAPE), computing_machine(RATES, SHAPE)):
        assert machine.rates.merge_seconds == OVERHEADS.merge > 0
    slow = replace(RATES, merge_seconds=1.0)
    assert computing_machine(slow, SHAPE).rates.merge_seconds == 1.0


def test_not_below_nothing() -> None:
    with pytest.raises(ConfigurationError, match="costs must not be negative"):
        replace(RATES, merge_seconds=-1.0)
