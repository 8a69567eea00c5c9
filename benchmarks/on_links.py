"""Run a benchmark on every rank of really shaped links: its own module, with the arguments that it was given."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def is_rank() -> bool:
    """Return whether this process is a rank of the links, and not the one that sets them up."""
    return "RANK" in os.environ


def run_on_links(
    script: str, topology: str, ranks: int, link_gbit: float, timeout_seconds: float, *folders: Path
) -> None:
    """Run a script, by its __file__, on links of a shape. folders: of modules that it imports, beside its own."""
    from tokenring.emulate import Emulated

    here = Path(script).resolve().parent
    paths = os.pathsep.join(map(str, (here.parent, here, *folders)))
    with Emulated(topology, ranks, link_gbit) as net:
        environment = {"PYTHONPATH": paths, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        net.run(Path(script).stem, sys.argv[1:], timeout_seconds, environment=environment)
