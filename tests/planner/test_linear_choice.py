"""The schedules that "auto" takes for linear layers and collectives, and what their tiles cost."""

from __future__ import annotations

import pytest
import torch

import tokenring as tr
from tokenring.ir.operators import OPERATORS
from tokenring.ir.schedule_data import PASSES
from tokenring.planner.choosing.linear import CANDIDATES, choose, collective
from tokenring.planner.interconnects.interconnect import full_mesh, ring
from tokenring.planner.simulation.operations import Costs
from tokenring.sequence.region import Patch
from tokenring.tables.rates import constant

LAYER = tr.Workload(1, 8192, 8192, 1, 1, 4096, torch.bfloat16)


def test_the_choice_follows_topology_and_sizes() -> None:
    """On a ring X goes round, on a mesh straight; tokens stay where they are more than features are wide."""
    assert choose("column", LAYER, 8, "weights", ring(8, 0.02)) == "tokenring"
    assert choose("column", LAYER, 8, "weights", full_mesh(8, 0.02)).startswith("direct-q")
    many = tr.Workload(1, 1 << 20, 4096, 1, 1, 4096, torch.bfloat16)
    assert choose("row", many, 4, "either", full_mesh(4, 0.01)).startswith("direct-kv")
    with pytest.raises(tr.ConfigurationError, match="has 4 ranks, the group has 8"):
        choose("column", LAYER, 8, "weights", ring(4, 1.0))


def test_a_collective_is_chosen_once_for_sizes_that_are_alike() -> None:
    """In two steps where every pair has a link; on others, by simulation."""
    assert collective(1 << 20, torch.float32, 8, None) == "direct-q"
    assert collective(1 << 20, torch.float32, 8, full_mesh(8, 0.02)).startswith("direct-q")
    chosen = {collective(n, torch.float32, 8, ring(8, 0.02)) for n in ((1 << 19) + 1, 1 << 20)}
    assert len(chosen) == 1 and chosen < set(CANDIDATES["weights"])
    with pytest.raises(tr.ConfigurationError, match="has 4 ranks, the group has 8"):
        collective(8, torch.float32, 8, ring(4, 1.0))


def test_tiles_cost_what_their_products_do() -> None:
    """A backward pass is two products of a layer, or one; a collective's tile computes nothing."""
    found = {}
    for operator in ("column", "row", "column-dx", "reduce"):
        made = tr.schedule("direct-q", 4).replace(operator=OPERATORS[operator])
        size = tr.Workload(1, 512, 512, 1, 1, 16)
        found[operator] = [
            Costs(made, size, direction, constant(1e-12)).kernel_seconds(Patch(0, 8, 0, 4)) / (2 * 8 * 4 * 16)
            for direction in PASSES
        ]
    assert found == {"column": [1, 2], "row": [1, 2], "column-dx": [1, 1], "reduce": [0, 0]}
