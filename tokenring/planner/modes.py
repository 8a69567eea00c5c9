"""Plans within a memory limit over transports that have modes with fewer connections, as HCCL has.

A mode costs time (messages share queues) and gives memory. Where a limit excludes what would be faster, or everything,
the call is planned for over each mode as well, and the fastest plan of all is taken, whichever mode it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from tokenring.errors import MemoryLimitError
from tokenring.planner.plan import Candidate, Forecast, Plan
from tokenring.planner.predict import Setting
from tokenring.planner.select import SAME, mb_text, time_text
from tokenring.schedule.target import Capabilities

P = TypeVar("P", Plan, Forecast)


def over(setting: Setting, able: Capabilities) -> Setting:
    """The same where messages move in the queues of this transport, and its connections take memory."""
    return replace(setting, machine=setting.machine.over(able), able=able)


def within_limit(
    plan_over: Callable[[Setting], P], setting: Setting, limit_bytes: int | None, modes: Mapping[str, Capabilities]
) -> P:
    """The fastest plan over the transport as it is, or where the limit excludes a faster one over one of its modes.

    modes: by name, those with most connections first. Raises MemoryLimitError where nothing fits over any, and at once
    whatever else `plan_over` raises: it has nothing to do with the limit.
    """
    if limit_bytes is None or not modes:
        return plan_over(setting)
    refusals: list[MemoryLimitError] = []
    found: list[tuple[str | None, P]] = []
    settings: list[tuple[str | None, Setting]] = [(None, setting)]
    settings += [(mode, over(setting, able)) for mode, able in modes.items()]
    for mode, each in settings:
        try:
            found.append((mode, plan_over(each)))
        except MemoryLimitError as error:
            refusals.append(error)
        if mode is None and found and not excluded(found[0][1].candidates, limit_bytes):
            return found[0][1]
    if not found:
        raise MemoryLimitError(f"{refusals[-1]}. That is over {list(modes)[-1]!r}; over others it is more")
    least = min(seconds(plan) for _, plan in found)
    mode, best = next((mode, plan) for mode, plan in found if seconds(plan) <= least * SAME)
    if mode is None:
        return best
    return replace(best, transport=mode, reason=f"{best.reason}; {_why(mode, best, found[0], limit_bytes)}")


def excluded(candidates: tuple[Candidate, ...], limit_bytes: int) -> bool:
    """Whether what was simulated and does not fit is faster than what does: the first of them."""
    best = candidates[0].predicted_seconds or 0.0
    return any(
        each.predicted_seconds is not None
        and each.predicted_seconds * SAME < best
        and (each.peak_bytes or 0) > limit_bytes
        for each in candidates
    )


def seconds(plan: Plan | Forecast) -> float:
    """As predicted."""
    found = plan.candidates[0].predicted_seconds
    return float("inf") if found is None else found


def _why(mode: str, best: Plan | Forecast, first: tuple[str | None, Plan | Forecast], limit_bytes: int) -> str:
    chosen = best.candidates[0]
    held = f"{chosen.connections} communicators ({mb_text(chosen.connection_bytes or 0)})"
    name, plan = first
    other = "nothing fits" if name else f"{plan.name} is the best that fits, with {time_text(seconds(plan))},"
    return f"over transport {mode!r}, for its {held}: without, {other} in {mb_text(limit_bytes)} a rank"
