"""Plans within a limit over transports that have modes with fewer connections, as HCCL has.

A mode costs time (messages share queues) and gives memory. Where a limit of memory excludes what would be faster, or
everything, the call is planned for over each mode as well, and the fastest plan of all is taken, whichever mode it
needs; so it is wherever the connections themselves are limited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from tokenring.display.units import mb_text, time_text
from tokenring.errors import ConfigurationError, MemoryLimitError
from tokenring.lowering.target import Target
from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.planner.choosing.select import SAME
from tokenring.planner.simulation.predict import Setting

P = TypeVar("P", Plan, Forecast)


def over(setting: Setting, target: Target) -> Setting:
    """Return the setting where messages move in the queues of this transport, and its connections take memory."""
    return replace(setting, machine=setting.machine.over(target), target=target)


def within_limit(
    plan_over: Callable[[Setting], P], setting: Setting, limit_bytes: int | None, modes: Mapping[str, Target]
) -> P:
    """Return the fastest plan over the transport as it is, or where a limit excludes a faster one, over a mode of it.

    modes: by name, those with most connections first. Raises MemoryLimitError where nothing fits over any, and at once
    whatever else `plan_over` raises, which has nothing to do with the limit; a ConfigurationError where the connections
    are limited.
    """
    few = setting.target.most_connections is not None
    if (limit_bytes is None and not few) or not modes:
        return plan_over(setting)
    refusals: list[tuple[str, ConfigurationError]] = []
    found: list[tuple[str | None, P]] = []
    settings: list[tuple[str | None, Setting]] = [(None, setting)]
    settings += [(mode, over(setting, target)) for mode, target in modes.items()]
    for mode, each in settings:
        try:
            found.append((mode, plan_over(each)))
        except ConfigurationError as error:
            if not few and not isinstance(error, MemoryLimitError):
                raise
            refusals.append((mode or "it", error))
        if mode is None and found and not few and not excluded(found[0][1].candidates, limit_bytes):
            return found[0][1]
    if not found:
        name, least_needed = min(reversed(refusals), key=lambda each: _needed(each[1]))
        others = "" if _needed(least_needed) == float("inf") else "; over others it is more"
        raise type(least_needed)(f"{least_needed}. That is over {name!r}{others}")
    least = min(seconds(plan) for _, plan in found)
    mode, best = next((mode, plan) for mode, plan in found if seconds(plan) <= least * SAME)
    if mode is None:
        return best
    most = setting.target.most_connections
    limit = f"within {most} communicators" if few else f"in {mb_text(limit_bytes or 0)} a rank"
    reason = f"{best.reason}; {_why(mode, best, found[0], limit)}"
    reason += f" ({setting.target.why_few_connections})" if few else ""
    return replace(best, transport=mode, reason=reason)


def _needed(error: ConfigurationError) -> float:
    """Return the bytes that a refusal says are needed; infinity where it says none."""
    found = getattr(error, "needs_bytes", None)
    return float("inf") if found is None else found


def excluded(candidates: tuple[Candidate, ...], limit_bytes: int | None) -> bool:
    """Return whether what does not fit is faster than what does, the first of them, or was not simulated."""
    best, limit = candidates[0].predicted_seconds or 0.0, float("inf") if limit_bytes is None else limit_bytes
    return any(
        (each.predicted_seconds is None or each.predicted_seconds * SAME < best) and (each.peak_bytes or 0) > limit
        for each in candidates
    )


def seconds(plan: Plan | Forecast) -> float:
    """Return the predicted seconds of a plan; infinity where there is no prediction."""
    found = plan.candidates[0].predicted_seconds
    return float("inf") if found is None else found


def _why(mode: str, best: Plan | Forecast, first: tuple[str | None, Plan | Forecast], limit: str) -> str:
    chosen = best.candidates[0]
    held = f"{chosen.connections} communicators ({mb_text(chosen.connection_bytes or 0)})"
    name, plan = first
    other = "nothing fits" if name else f"{plan.name} is the best that fits, with {time_text(seconds(plan))},"
    return f"over transport {mode!r}, for its {held}: without, {other} {limit}"
