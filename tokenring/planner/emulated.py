"""Emulated links as the planner sees them: the same wires and ways that the emulation is made of."""

from __future__ import annotations

from tokenring.emulate.shapes import Shape
from tokenring.emulate.ways import ways, wires
from tokenring.planner.interconnect import Fabric, Interconnect, of_one_host

BITS_OF_A_BYTE = 8


def interconnect_of_shape(shape: Shape) -> Interconnect:
    """The interconnect of an emulated shape."""
    fabric = shape.fabric
    gbs = {name: gbit / BITS_OF_A_BYTE for name, gbit in wires(fabric).items()}
    return of_one_host(str(shape), Fabric(shape.ranks, ways(fabric), gbs))
