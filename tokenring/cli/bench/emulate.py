"""`tokenring bench --emulate`: its options, and its ranks on emulated links."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from tokenring.cli.bench.results import RaceCase
from tokenring.emulate.shapes import FABRICS, SHAPES, Shape
from tokenring.errors import ConfigurationError
from tokenring.launch.command import start_torchrun
from tokenring.launch.follow import Running

if TYPE_CHECKING:
    from tokenring.emulate.processes import RankProcesses

# As the options are called, and as Shape calls them.
PARTS = ("link_gbit", "uplink_gbit", "half_duplex_uplink", "node_fabric", "nic_per_rank")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of links, and of the speed of kernels on them."""
    group = parser.add_argument_group("emulated links (docs/emulate.md)", "on one machine with Linux, as root")
    add = group.add_argument
    add("--emulate", choices=[*SHAPES], help="join the ranks by really shaped links of this shape")
    add("--link-gbit", type=float, metavar="X", help="Gbit/s of each link or port, each direction")
    add("--uplink-gbit", type=float, metavar="Y", help="pcie-tree, two-node: of uplinks or NICs (as the links)")
    add("--half-duplex-uplink", action="store_true", help="both directions of an uplink share its rate")
    add("--node-fabric", choices=FABRICS, help="two-node: inside a node (full-mesh)")
    add("--nic-per-rank", action="store_true", help="two-node: a port to the network for each rank")
    add("--compute", type=float, metavar="RATE", help="kernels sleep as if each rank had RATE TFLOP/s (0.05)")


def check_options(options: argparse.Namespace, ranks: int, started: bool) -> dict[str, object]:
    """Return the fields of a case about emulation. Raises ConfigurationError for options that do not fit."""
    given = {name: getattr(options, name) for name in PARTS}
    if options.emulate is None:
        stray = [name for name in (*PARTS, "compute") if getattr(options, name) not in (None, False)]
        if stray:
            raise ConfigurationError(f"--{stray[0].replace('_', '-')} goes with --emulate SHAPE")
        return {}
    if started:
        raise ConfigurationError("--emulate starts ranks of its own, and torchrun has started some: use --ranks")
    if options.link_gbit is None:
        raise ConfigurationError(f"--emulate {options.emulate}: say how fast its links are, as in --link-gbit 0.1")
    if options.transport not in ("auto", "gloo"):
        raise ConfigurationError(f"--transport {options.transport} would bypass emulated links: use gloo")
    if options.compute is not None and not 1e-6 <= options.compute <= 1e6:
        raise ConfigurationError(f"--compute {options.compute:g}: give TFLOP/s from 1e-6 to 1e6")
    shape = Shape(options.emulate, ranks, **given)
    return {"emulate": shape, "compute_tflops": options.compute, "transport": "gloo"}


def start(case: RaceCase, ranks: int, module: str, arguments: list[str]) -> AbstractContextManager[Running]:
    """Start ranks for this case: on emulated links, if it has some."""
    if case.emulate is None:
        return start_torchrun(case, ranks, module, arguments)
    return _start_emulated(case.emulate, module, arguments)


@contextmanager
def _start_emulated(shape: Shape, module: str, arguments: list[str]) -> Iterator[RankProcesses]:
    from tokenring.emulate.net import Emulated

    with Emulated(**asdict(shape)) as net, net.start(module, arguments, all_speak=True) as processes:
        yield processes
