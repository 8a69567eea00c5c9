"""The schedules that "auto" takes for linear layers and collectives, and what their tiles cost."""

from __future__ import annotations

import pytest
import torch

import tokenring as tr
from tokenring.ir.operators import OPERATORS
from tokenring.ir.schedule_data import PASSES
from tokenring.ir.wire_formats import ENCODED, codecs_of, encoded
from tokenring.planner.choosing.linear import CANDIDATES, choose, collective
from tokenring.planner.interconnects.interconnect import full_mesh, ring
from tokenring.planner.simulation.operations import Costs
from tokenring.planner.simulation.predict import Setting, predict
from tokenring.sequence.region import Patch
from tokenring.tables.rates import Machine, Messages, constant

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


def test_wire_formats_take_less_time_on_links_and_some_to_encode_and_decode() -> None:
    """32 rows of x of 128, 256 bytes as they are and 132 in MXFP8: read and written once at each end, and sent."""
    size = tr.Workload(1, 64, 64, 1, 1, 128, torch.bfloat16)
    plain = tr.schedule("direct-q", 2, "contiguous", length=64).replace(operator=OPERATORS["column"])
    wired = encoded(plain, codecs_of("mxfp8", size.dtype, ENCODED))

    def microseconds(made: tr.Schedule, copy_gbs: float) -> float:
        machine = Machine(constant(1e6, copy_gbs=copy_gbs), Messages(0.0, 0.0))
        return predict(made, Setting(size, full_mesh(2, 1e-3), machine, ("forward",))).seconds * 1e6

    free = float("inf")
    assert [microseconds(made, free) for made in (plain, wired)] == pytest.approx([32 * 256, 32 * 132], abs=0.1)
    more = [microseconds(made, 1e-3) - microseconds(made, free) for made in (plain, wired)]
    assert more == pytest.approx([32 * (256 + 256), 2 * 32 * (256 + 132)], abs=0.1)
