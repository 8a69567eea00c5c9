"""Checks of what users give to a planner: they say what was asked, what there is, and what to do."""

from __future__ import annotations

from tokenring.errors import ConfigurationError
from tokenring.schedule.families.registry import is_known, parse
from tokenring.sequence.layout import as_integer


def check_topology(given: object, world_size: int, tensor_parallel: object = 1) -> None:
    """Raise ConfigurationError unless a topology is one of the group's ranks.

    It may also be one of all those whose heads tensor parallelism splits.
    """
    groups = as_integer(tensor_parallel) or 0
    if groups < 1:
        raise ConfigurationError(
            f"tensor_parallel={tensor_parallel!r}: give how many ranks share the heads, a positive integer"
        )
    if given is None:
        return
    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.topology.ranks import Topology

    if not isinstance(given, (Topology, Interconnect)):
        raise ConfigurationError(f"topology is of type {type(given).__name__}; give a Topology or an Interconnect")
    if given.world_size not in (world_size, world_size * groups):
        more = f", or of all {world_size * groups} that tensor_parallel={groups} makes" if groups > 1 else ""
        raise ConfigurationError(
            f"the topology has {given.world_size} ranks, the group has {world_size}: "
            f"give that of the group's ranks{more}"
        )


def check_memory_limit(given: object) -> None:
    """Raise ConfigurationError unless a memory limit in bytes is a positive integer, or None."""
    if given is not None and (as_integer(given) or 0) < 1:
        raise ConfigurationError(f"memory_limit_bytes={given!r}: give a positive integer, or None for no limit")


def restricted(text: str) -> tuple[str, ...]:
    """Return the families and schedules that "auto" or "auto:ring,usp/2" allows. Raises ConfigurationError."""
    name, colon, rest = text.partition(":")
    if name != "auto":
        raise ConfigurationError(f"schedule {text!r} is not one to plan for; say auto, or auto:ring,tokenring")
    families = tuple(rest.split(",")) if colon else ()
    for each in families:
        if not is_known(each):
            parse(each)  # says what is wrong
    return families
