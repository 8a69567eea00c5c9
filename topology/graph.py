"""Devices and the links between them, as the planner needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Topology:
    """`bandwidth_gbs` of each directed (source, destination) link, one way; None where unknown."""

    name: str
    world_size: int
    bandwidth_gbs: Mapping[tuple[int, int], float | None] = field(default_factory=dict)


def full_mesh(world_size: int, bandwidth_gbs: float | None = None) -> Topology:
    """Every pair of ranks has a link of its own."""
    pairs = {(a, b): bandwidth_gbs for a in range(world_size) for b in range(world_size) if a != b}
    return Topology("full mesh", world_size, pairs)
