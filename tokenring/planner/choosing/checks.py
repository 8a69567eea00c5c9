"""Checks of what users give to a planner: they say what was asked, what there is, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenring.errors import ConfigurationError
from tokenring.schedule.families.registry import is_known, parse
from tokenring.schedule.names import goes_in_parts
from tokenring.schedule.scheme import WHOLE_UNITS
from tokenring.schedule.size_limits import JOB_RANKS, MADE_RANKS
from tokenring.sequence.layout import as_integer

if TYPE_CHECKING:
    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.planner.simulation.predict import Setting
    from tokenring.sequence.layout import Layout
    from tokenring.sequence.mask import Mask
    from tokenring.sequence.workload import Workload

IN_THE_COMMAND = f"ask for fewer, as with --ranks {MADE_RANKS} or a preset of fewer hosts"
IN_A_JOB = "use smaller groups, or name a schedule if that is worth it (`tokenring plan` says which is fastest)"


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


def check_made(net: Interconnect, what: str, instead: str = IN_THE_COMMAND) -> None:
    """Raise ConfigurationError where a schedule of all ranks would take too long to make; says what to do instead."""
    if net.world_size > MADE_RANKS:
        raise ConfigurationError(
            f"{what} needs a schedule of {net.world_size:,} ranks, each of its moves; more than {MADE_RANKS} take "
            f"minutes and gigabytes: {instead}"
        )


def check_in_job(setting: Setting, mask: Mask) -> None:
    """Raise ConfigurationError for a job of so many ranks that each makes its own part alone, where none can."""
    ranks = setting.interconnect.world_size
    if ranks > JOB_RANKS:
        raise ConfigurationError(
            f"schedule='auto' plans for at most {JOB_RANKS:,} ranks in a job, not {ranks:,}: {IN_A_JOB}"
        )
    if setting.target.needs_all:
        check_made(setting.interconnect, "schedule='auto' over this transport", IN_A_JOB)
    if mask not in WHOLE_UNITS:
        check_made(setting.interconnect, f"schedule='auto' with mask {mask}", IN_A_JOB)


def check_parts(name: str, workload: Workload, q_layout: Layout, kv_layout: Layout, mask: Mask) -> None:
    """Raise ConfigurationError for a schedule of too many ranks to make it whole, of which there are no parts."""
    ranks = q_layout.world_size
    if ranks > MADE_RANKS and not goes_in_parts(name, workload, q_layout, kv_layout, mask):
        raise ConfigurationError(
            f"schedule {name!r} has to be made whole, each of its moves, on every rank; of {ranks:,} ranks that takes "
            f"minutes and gigabytes: {IN_A_JOB}"
        )
