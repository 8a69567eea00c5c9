"""Accelerators emulated on one Linux machine: a network namespace for each rank, joined by shaped links.

A `Shape` is the request. `shapes` turns it into an `EmulatedFabric` (nodes, links, routes), `ways` gives the route of
each message, `plan` the commands of the tools. All of these are data and need no root. `build` calls the tools,
`guardian` removes what they made, however this process ends, and `processes` runs the ranks. See docs/emulate.md.

    with Emulated("full-mesh", ranks=4, link_gbit=0.1) as net:
        lines = net.run("my_module", ["--option"], timeout_seconds=60)
"""

from tokenring.emulate.net import Emulated
from tokenring.emulate.shapes import SHAPES, Shape

__all__ = ["SHAPES", "Emulated", "Shape"]
