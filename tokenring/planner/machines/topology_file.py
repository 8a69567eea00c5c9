"""The topology to plan for, out of a file."""

from __future__ import annotations

import os

from tokenring.errors import ConfigurationError
from tokenring.planner.machines.presets import PREFIX, like
from tokenring.topology.model.graph import merge
from tokenring.topology.probing.cache import measured_file
from tokenring.topology.probing.files import read_file
from tokenring.topology.ranks import Topology


def read_topology(path: str) -> Topology:
    """Return a saved topology, or a tool's dump, from a file. Raises ConfigurationError if it has no accelerators."""
    if path == "measured":
        path = str(measured_file(os.environ))
    elif not os.path.exists(path) and (meant := like(path, PREFIX)):
        raise ConfigurationError(f"cannot read {path!r}: No such file or directory{meant}")
    topology = Topology.of(merge(read_file(path)))
    if topology.world_size == 0:
        raise ConfigurationError(f"{path!r} has no accelerators to plan for: give another file, or preset:NAME")
    return topology
