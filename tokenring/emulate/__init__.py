"""Accelerators emulated on one Linux machine: a network namespace for each rank, joined by really shaped links.

A `Shape` is what is asked. `shapes` turns it into a `Fabric` (nodes, links, routes), `ways` says which wires a
message passes, `plan` which tools are to be called with what: all of it data, which needs no root. `build` calls
the tools, `guardian` removes what they made, whatever happens to us, `processes` runs the ranks. docs/emulate.md.

    with Emulated("full-mesh", ranks=4, link_gbit=0.1) as net:
        lines = net.run("my_module", ["--option"], timeout_seconds=60)
"""

from tokenring.emulate.net import Emulated
from tokenring.emulate.shapes import SHAPES, Shape

__all__ = ["SHAPES", "Emulated", "Shape"]
