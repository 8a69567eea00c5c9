"""What users give to ContextParallel: checks that say what was asked, what there is, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, cast

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Layout, as_integer
from tokenring.sequence.mask import Mask

if TYPE_CHECKING:
    from tokenring.schedule.schedule import Schedule

LEAST_SECONDS = 0.001  # below, Gloo takes it for no limit at all
MOST_SECONDS = 1e9  # above, clocks overflow


def check_schedule_name(name: object) -> None:
    from tokenring.schedule.families.registry import FAMILIES, forms, is_known, parse

    if not isinstance(name, str):
        raise ConfigurationError(
            f"schedule is of type {type(name).__name__}; choose auto, one of {forms()}, or give a Scheme, "
            f"a Schedule or a Plan"
        )
    base, restricted, families = name.partition(":")
    asked = families.split(",") if restricted else [base]
    unknown = [each for each in asked if not is_known(each)]
    if (base != "auto" and (restricted or unknown)) or (restricted and unknown):
        raise ConfigurationError(
            f"unknown schedule {unknown[0] if unknown else name!r} in {name!r}; choose auto, one of "
            f"{forms()}, or restrict the choice, as in 'auto:ring,tokenring'"
        )
    for each in asked if name != "auto" else ():
        if not (restricted and each in FAMILIES):  # auto chooses the parameters of a family
            parse(each)


def check_schedule(given: object, pieces: object, world_size: int) -> None:
    """A schedule, by name or itself, for so many ranks, in so many pieces. Raises ConfigurationError."""
    from tokenring.ir.schedule_data import Schedule
    from tokenring.planner.choosing.plan import Plan
    from tokenring.schedule.families.registry import misfit
    from tokenring.schedule.scheme import Scheme

    made = given.schedule if isinstance(given, Plan) else given
    if not isinstance(made, (Scheme, Schedule)):
        check_schedule_name(made)
        assert isinstance(made, str)
        if not made.startswith("auto") and (reason := misfit(made, world_size)) is not None:
            raise ConfigurationError(reason)
    elif isinstance(made, Schedule) and made.world_size != world_size:
        raise ConfigurationError(f"the schedule is for {made.world_size} ranks, the group has {world_size}")
    if pieces is None:
        return
    if (as_integer(pieces) or 0) < 1:
        raise ConfigurationError(f"pieces={pieces!r}: give an integer from 1 on, or None for the default")
    if not isinstance(given, str) or given.startswith("auto"):
        raise ConfigurationError(f"pieces={pieces} goes with a schedule by name; others say it themselves")


def check_made_for(schedule: Schedule, q_layout: Layout, kv_layout: Layout, mask: Mask) -> None:
    for what, made, wanted in (
        ("q layout", schedule.q_layout, q_layout),
        ("kv layout", schedule.kv_layout, kv_layout),
        ("mask", schedule.mask, mask),
    ):
        if made != wanted:
            text = [
                f"{each.name} of {each.length}" if isinstance(each, Layout) else str(each) for each in (made, wanted)
            ]
            raise ConfigurationError(
                f"schedule {schedule.name!r} was made for {what} {text[0]}, but the call has {text[1]}: "
                f"make it for this call, or give its Scheme, which is built for each"
            )


def check_topology(given: object, world_size: int, tensor_parallel: object = 1) -> None:
    """Of the group's ranks, or of all those whose heads tensor parallelism splits."""
    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.topology.model.ranks import Topology

    groups = as_integer(tensor_parallel) or 0
    if groups < 1:
        raise ConfigurationError(
            f"tensor_parallel={tensor_parallel!r}: give how many ranks share the heads, an integer from 1 on"
        )
    if given is None:
        return
    if not isinstance(given, (Topology, Interconnect)):
        raise ConfigurationError(f"topology is of type {type(given).__name__}; give a Topology or an Interconnect")
    if given.world_size not in (world_size, world_size * groups):
        more = f", or of all {world_size * groups} that tensor_parallel={groups} makes" if groups > 1 else ""
        raise ConfigurationError(
            f"the topology has {given.world_size} ranks, the group has {world_size}: "
            f"give that of the group's ranks{more}"
        )


def check_transport(given: object, rank: int, world_size: int) -> None:
    from tokenring.backends.interfaces import Transport
    from tokenring.backends.registry import TRANSPORTS

    if given is None and world_size == 1:  # what `transport` says where there is one rank
        return
    if not isinstance(given, Transport):
        check_name("transport", given, TRANSPORTS, ", or the `transport` of another ContextParallel")
    elif (given.rank, given.world_size) != (rank, world_size):
        raise ConfigurationError(
            f"in the transport this is rank {given.rank} of {given.world_size}, in the group "
            f"rank {rank} of {world_size}: give a transport of the same group"
        )


def check_memory_limit(given: object) -> None:
    if given is not None and (as_integer(given) or 0) < 1:
        raise ConfigurationError(f"memory_limit_bytes={given!r}: give an integer from 1 on, or None for no limit")


def check_name(what: str, given: object, known: Iterable[str], more: str) -> None:
    choice = f"choose one of auto, {', '.join(known)}{more}"
    if not isinstance(given, str):
        raise ConfigurationError(f"{what} is of type {type(given).__name__}; {choice}")
    if given != "auto" and given not in known:
        raise ConfigurationError(f"unknown {what} {given!r}; {choice}")


def seconds_limit(given: object) -> float:
    number = isinstance(given, Real) and not isinstance(given, bool)
    if not number or not LEAST_SECONDS <= float(cast(float, given)) <= MOST_SECONDS:
        raise ConfigurationError(
            f"timeout_seconds={given!r}: give a number of seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:g}"
        )
    return float(cast(float, given))
