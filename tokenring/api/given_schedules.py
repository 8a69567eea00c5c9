"""Schedules that are not chosen by name: those that users give to a context, and those that the planner chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tokenring.errors import ConfigurationError
from tokenring.ir.passes import for_call
from tokenring.planner.choosing.plan import Plan
from tokenring.schedule.schedule import GivenSchedule, Schedule
from tokenring.schedule.scheme import Scheme, build
from tokenring.sequence.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenring.backends.interfaces import AttentionKernel, Transport
    from tokenring.ir.wire_formats import Codecs
    from tokenring.lowering.target import Target
    from tokenring.planner.choosing.planner import Planner
    from tokenring.sequence.mask import Mask
    from tokenring.sequence.workload import Request


def given_schedule(
    asked: Scheme | Schedule | Plan, request: Request, layouts: tuple[Layout, Layout], codecs: Codecs = ()
) -> GivenSchedule | Plan:
    """Return what was given, proved, for calls of these layouts. Raises ConfigurationError, ScheduleError.

    codecs: formats of its requests, of a Scheme or Schedule that has none of its own.
    """
    if isinstance(asked, Schedule):
        check_made_for(asked, *layouts, request.mask)
        return GivenSchedule(_of_call(asked, request, codecs), "the schedule that was given")
    if isinstance(asked, Scheme):
        made = build(asked, *layouts, request.mask)
        return GivenSchedule(_of_call(made, request, codecs), "the scheme that was given")
    check_made_for(asked.schedule, *layouts, request.mask)
    reason = f"the plan that was given: {asked.reason}"
    return replace(asked, schedule=_of_call(asked.schedule, request), workload=request.workload, reason=reason)


def _of_call(schedule: Schedule, request: Request, codecs: Codecs = ()) -> Schedule:
    """Return the schedule as the call takes it, proved: encoded, and with the lse or without it."""
    if codecs:
        from tokenring.ir.wire_formats import encoded

        schedule = encoded(schedule, codecs)
    return for_call(schedule, request.wants_lse).verify()


def check_made_for(schedule: Schedule, q_layout: Layout, kv_layout: Layout, mask: Mask) -> None:
    """Raise ConfigurationError unless the schedule was made for the layouts and the mask of the call."""
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


def planned(
    planner: Planner,
    request: Request,
    layouts: tuple[Layout, Layout],
    kernel: AttentionKernel,
    transport: Transport | None,
    modes: Mapping[str, Target],
    max_error: float | None = None,
) -> Plan:
    """Return what the planner chooses; the reason says why this transport, where that was chosen too.

    max_error: what a wire format may add to a result, where one makes the call faster; None: there is none.
    """
    refine = None
    if max_error is not None:
        from tokenring.planner.formats.error_budget import within_error

        refine = partial(within_error, max_error=float(max_error))
    found = planner.plan(request, layouts, kernel, None if transport is None else transport.target, modes, refine)
    why = getattr(transport, "why", "")
    return replace(found, reason=f"{found.reason}; {why}") if why else found
