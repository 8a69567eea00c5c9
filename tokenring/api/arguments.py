"""Checks of the contexts' arguments, whose errors say what was asked, what there is, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from numbers import Real
from typing import TYPE_CHECKING, TypeGuard, cast

from tokenring.errors import ConfigurationError, TokenRingError, UnsupportedError
from tokenring.schedule.schedule import GivenSchedule
from tokenring.sequence.layout import AUTO, Layout, as_integer, read_name

if TYPE_CHECKING:
    from tokenring.backends.interfaces import Transport
    from tokenring.ir.wire_formats import Codecs
    from tokenring.launch.groups import Held
    from tokenring.planner.choosing.plan import Plan
    from tokenring.schedule.schedule import Schedule
    from tokenring.schedule.scheme import Scheme
    from tokenring.sequence.workload import Request
STAYS = ("weights", "tokens", "either")
NO_LAYOUT = "layout is of type {}; give a Layout, or none: that of cp"
NEEDS_MASK = (
    'layout "auto" cuts a sequence by its mask: give mask=..., the mask of the attention over it, or layout=..., '
    "as cp.layout_for(length, mask) returns it"
)
LEAST_SECONDS = 0.001  # below, Gloo takes it for no limit at all
MOST_SECONDS = 1e9  # above, clocks overflow
WHOLE_RANKS = 16  # up to which all of a named schedule takes no longer to make than a rank's part (measured)


def check_schedule_name(name: object) -> None:
    """Raise ConfigurationError unless this is the name of a schedule, or "auto", alone or with families."""
    from tokenring.schedule.families.registry import FAMILIES, family_of, forms, is_known, parse

    if not isinstance(name, str):
        raise ConfigurationError(
            f"schedule is of type {type(name).__name__}; choose auto, one of {forms()}, or give a Scheme, "
            f"a Schedule or a Plan"
        )
    base, restricted, families = name.partition(":")
    asked = families.split(",") if restricted else [base]
    unknown = [each for each in asked if not is_known(each)]
    if (base != "auto" and (restricted or unknown)) or (restricted and unknown):
        from tokenring.nearest import hint

        wrong = unknown[0] if unknown else name
        like = hint(family_of(wrong), ["auto", *FAMILIES])
        raise ConfigurationError(
            f"unknown schedule {wrong!r} in {name!r}; choose auto, one of "
            f"{forms()}, or restrict the choice, as in 'auto:ring,tokenring'{like}"
        )
    for each in asked if name != "auto" else ():
        if not (restricted and each in FAMILIES):  # auto chooses the parameters of a family
            parse(each)


def check_computing(layout: object, kernel: object) -> None:
    """Raise ConfigurationError unless this is a Layout, or the name of one, and the name of a kernel."""
    from tokenring.lowering.backend_names import KERNELS

    if not isinstance(layout, Layout) and layout != AUTO:
        read_name(layout)
    check_name("kernel", kernel, KERNELS, "")


def check_linear(
    schedule: object, topology: object, *, stays: object, partials: object, wire: str | None, kernel: object
) -> None:
    """Raise ConfigurationError unless this is what TensorParallel takes."""
    import torch  # the doctor checks names without it

    from tokenring.lowering.backend_names import LINEAR_KERNELS

    if stays not in STAYS:
        from tokenring.nearest import hint

        raise ConfigurationError(f"stays={stays!r}: use one of {', '.join(STAYS)}{hint(stays, STAYS)}")
    if not isinstance(schedule, str):
        raise ConfigurationError(f"schedule={schedule!r}: give a name, as 'direct-q', or 'auto'")
    if partials not in (None, torch.float32):
        raise ConfigurationError(f"partials={partials}: use torch.float32, or None for the tensors' dtype")
    if wire is not None:
        from tokenring.ir.wire_formats import wire_format

        wire_format(wire)
    if topology is not None:
        from tokenring.planner.interconnects.interconnect import Interconnect

        if not isinstance(topology, Interconnect):
            raise ConfigurationError(f"topology is of type {type(topology).__name__}; give an Interconnect, or None")
    check_name("kernel", kernel, LINEAR_KERNELS, "")
    given = {"schedule": schedule, "stays": stays, "partials": partials, "wire": wire}
    others = [f"{name}={value!r}" for name, value in given.items() if value not in ("auto", "weights", None)]
    if kernel != "auto" and others:
        raise ConfigurationError(
            f"kernel={kernel!r} does whole layers, whose weights stay, in the tensors' dtype and by no schedule: leave "
            f"out {', '.join(others)}, or the kernel"
        )


def check_planning(
    topology: object, memory_limit_bytes: object, world_size: int, tensor_parallel: object
) -> None:
    """Raise ConfigurationError unless this is what the planner takes; what is left out, it does."""
    if topology is None and memory_limit_bytes is None and type(tensor_parallel) is int and tensor_parallel == 1:
        return
    from tokenring.planner.choosing.checks import check_memory_limit, check_topology

    check_topology(topology, world_size, tensor_parallel)
    check_memory_limit(memory_limit_bytes)


def check_schedule(given: object, pieces: object, world_size: int) -> None:
    """Raise ConfigurationError unless this schedule, by name or itself, fits so many ranks and pieces."""
    from tokenring.ir.schedule_data import ScheduleData
    from tokenring.schedule.families.registry import misfit
    from tokenring.schedule.scheme import Scheme

    made = given.schedule if is_plan(given) else given
    if not isinstance(made, (Scheme, ScheduleData)):
        check_schedule_name(made)
        assert isinstance(made, str)
        if not made.startswith("auto") and (reason := misfit(made, world_size)) is not None:
            raise ConfigurationError(reason)
    elif isinstance(made, ScheduleData) and made.world_size != world_size:
        raise ConfigurationError(f"the schedule is for {made.world_size} ranks, the group has {world_size}")
    if pieces is None:
        return
    if (as_integer(pieces) or 0) < 1:
        raise ConfigurationError(f"pieces={pieces!r}: give a positive integer, or None for the default")
    if not isinstance(given, str) or given.startswith("auto"):
        raise ConfigurationError(f"pieces={pieces} goes with a schedule by name; others say it themselves")


def is_plan(given: object) -> TypeGuard[Plan]:
    """Tell whether a schedule was given as a Plan: of the planner's, which names and schedules do without."""
    if isinstance(given, str):
        return False
    from tokenring.planner.choosing.plan import Plan

    return isinstance(given, Plan)


def check_wire(wire: object, schedule: object, max_error: object = None) -> None:
    """Raise ConfigurationError unless this is a wire format or None, UnsupportedError if the schedule is planned.

    One that has formats of its own takes no other. max_error: a number above 0 goes with a planned schedule alone.
    """
    automatic = isinstance(schedule, str) and schedule.startswith("auto")
    if max_error is not None:
        number = isinstance(max_error, Real) and not isinstance(max_error, bool)
        if not number or not 0 < float(cast(float, max_error)) < math.inf:
            raise ConfigurationError(f"max_error={max_error!r}: give a number above 0, as 0.05, or None for no format")
        if not automatic:
            raise ConfigurationError(
                f"max_error={max_error!r} goes with schedule='auto', which chooses a format by it; else name one, as "
                f"wire='mxint8'"
            )
    if wire is None:
        return
    from tokenring.ir.wire_formats import wire_format

    wire_format(wire)
    if automatic or is_plan(schedule):
        raise UnsupportedError(
            f"wire={wire!r} with a schedule that is planned is not supported: name one, as schedule='direct-kv', or "
            f"say max_error, within which a format is chosen"
        )
    if not isinstance(schedule, str) and (own := getattr(schedule, "codecs", ())):
        has = ", ".join(f"{kind} in {codec}" for kind, codec in own)
        raise ConfigurationError(
            f"wire={wire!r} with schedule {getattr(schedule, 'name', '')!r}, which has formats of its own ({has}): "
            f"leave one of them out"
        )


def wire_text(wire: str | None, max_error: float | None, request: Request, named: Callable[[], str]) -> str:
    """Return what ranks compare of formats on the wire. named: of the schedule that is encoded, which may refuse it.

    Raises UnsupportedError where this rank's device fails with a format that may be chosen.
    """
    if max_error is not None:
        from tokenring.backends.codecs.trial import check_device
        from tokenring.planner.formats.error_budget import allowed

        for form in allowed(request.workload, ("forward",), float(max_error)):
            check_device(form.name, request.workload.dtype, request.device)
        return f", formats on the wire within an error of {float(max_error):g}"
    return "" if wire is None else f", {wire} on the wire of {named()}"


def refuse_wire(wire: str | None, what: str) -> None:
    """Raise UnsupportedError if there is a wire format, for what does not encode anything."""
    if wire is not None:
        raise UnsupportedError(
            f"{what} in a wire format is not supported, and its ContextParallel has wire={wire!r}: give it another one"
        )


def not_chosen(
    asked: str | Scheme | Schedule | Plan,
    request: Request,
    layouts: tuple[Layout, Layout],
    pieces: int | None,
    wire: str | None,
) -> GivenSchedule | Plan:
    """Return the schedule that was named or given, for calls of these layouts, with its requests in a wire format."""
    codecs = () if wire is None else _codecs(wire, request)
    if not isinstance(asked, str):
        from tokenring.api.given_schedules import given_schedule

        return given_schedule(asked, request, layouts, codecs)
    from tokenring.schedule.names import named_schedule, schedule_in_parts

    in_parts = layouts[0].world_size > WHOLE_RANKS and not codecs
    make = schedule_in_parts if in_parts else named_schedule
    named = make(asked, request.workload, *layouts, request.mask, pieces)
    if codecs:
        from tokenring.ir.wire_formats import encoded
        from tokenring.proof.encodings import check_codecs

        named = encoded(named, codecs)
        check_codecs(named)  # the rest of the proof tests have made, as of all that have names
    if not request.wants_lse:
        from tokenring.ir.passes import without_lse

        named = without_lse(named)
    return GivenSchedule(named, f"requested by name: {asked}")


def _codecs(wire: str, request: Request) -> Codecs:
    """Return the codecs of attention's requests.

    Raises ConfigurationError where the format does not fit or saves nothing, UnsupportedError where the device fails.
    """
    from tokenring.backends.codecs.trial import check_device
    from tokenring.ir.wire_formats import REQUESTS_ENCODED, check_width, codecs_of

    size = request.workload
    for width in (size.head_dim, size.value_dim):
        check_width(wire, width)
    codecs = codecs_of(wire, size.dtype, REQUESTS_ENCODED)
    check_device(wire, size.dtype, request.device)
    return codecs


def named_in_mode(
    found: GivenSchedule | Plan, modes: object, transport: str | Transport, group: Held | None, request: Request
) -> GivenSchedule | Plan:
    """Return a schedule that was named or given, in a mode of the transport if it has any, for few connections."""
    if not modes or not isinstance(found, GivenSchedule):
        return found
    from tokenring.planner.choosing.connections import within_connections

    return within_connections(found, transport, group, request.device)


def schedule_text(given: str | Scheme | Schedule | Plan, made: Callable[[], Schedule]) -> str:
    """Return the schedule as ranks compare it; of the user's own, all its content. made: makes that of a Scheme."""
    from tokenring.ir.passes import for_call
    from tokenring.runtime.agreement import named_digest
    from tokenring.schedule.schedule import Schedule

    if isinstance(given, str):
        return given
    if isinstance(given, Schedule):
        return named_digest(given)
    if is_plan(given):
        return f"{named_digest(given.schedule)} over {given.transport or 'any transport'}"
    try:  # a Scheme's functions print differently in each process; what they make does not
        return named_digest(for_call(made(), True))  # whether it goes without lse, the call says
    except TokenRingError as error:
        return f"{given.name!r}, which cannot be used: {error}"


def check_transport(given: object, rank: int, world_size: int) -> None:
    """Raise ConfigurationError unless this is a transport's name, or a transport in which this rank is the group's."""
    from tokenring.backends.interfaces import Transport, faults_of
    from tokenring.lowering.backend_names import TRANSPORTS

    if given is None and world_size == 1:  # what `transport` says where there is one rank
        return
    if not hasattr(given, "target") and not hasattr(given, "send"):  # every transport has both
        check_name("transport", given, TRANSPORTS, ", or the `transport` of another ContextParallel")
        return
    if faults := faults_of(given):
        raise ConfigurationError(
            f"transport is of type {type(given).__name__}, which has no {', '.join(faults)}: give it what "
            f"backends.interfaces.Transport asks for, or a target that promises less"
        )
    own = cast(Transport, given)
    if (own.rank, own.world_size) != (rank, world_size):
        raise ConfigurationError(
            f"in the transport this is rank {own.rank} of {own.world_size}, in the group "
            f"rank {rank} of {world_size}: give a transport of the same group"
        )


def check_name(what: str, given: object, known: Collection[str], more: str) -> None:
    """Raise ConfigurationError unless `given` is "auto" or known. what: the argument; more: what else to choose."""
    choice = f"choose one of auto, {', '.join(known)}{more}"
    if not isinstance(given, str):
        raise ConfigurationError(f"{what} is of type {type(given).__name__}; {choice}")
    if given != "auto" and given not in known:
        from tokenring.nearest import hint

        raise ConfigurationError(f"unknown {what} {given!r}; {choice}{hint(given, ['auto', *known])}")


def seconds_limit(given: object) -> float:
    """Return a time limit as seconds. Raises ConfigurationError unless it is a number in the allowed range."""
    number = isinstance(given, Real) and not isinstance(given, bool)
    if not number or not LEAST_SECONDS <= float(cast(float, given)) <= MOST_SECONDS:
        raise ConfigurationError(
            f"timeout_seconds={given!r}: give a number of seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:g}"
        )
    return float(cast(float, given))
