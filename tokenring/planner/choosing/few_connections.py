"""Plans with few connections, where a transport advises that and the time allows it: HCCL's take gigabytes.

A mode of the transport makes fewer connections for the same schedule; its messages share queues. Where the chosen
schedule would make more than `Target.advised_connections` at a rank, it is predicted over such modes, and the fastest
is taken that costs little time. Advice refuses nothing: where no mode does, the plan stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from tokenring.display.units import mb_text, time_text
from tokenring.errors import ConfigurationError
from tokenring.lowering.target import Target
from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.choosing.memory_fallback import seconds
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.planner.simulation.predict import Setting

P = TypeVar("P", Plan, Forecast)
MOST_FOR_FEW = 1.1  # times the plan's time that fewer connections may cost: a policy, predictions are off by 5%
HARDLY = 1.01  # times: what costs so little and keeps to the advice ends the search


def with_few_connections(
    plan: P, setting: Setting, limit_bytes: int | None, modes: Mapping[str, Target], plan_over: Callable[[str, str], P]
) -> P:
    """Return the plan, or the same schedule over a mode with as few connections as are advised.

    plan_over: plans the call over a mode with a schedule, both by their names. Within a limit nothing changes. A mode
    is taken if it costs little time and its connections take less memory: the fastest that keeps to the advice, else
    the one that has fewest.
    """
    target, most = setting.target, setting.target.advised_connections
    if most is None or limit_bytes is not None or plan.transport is not None:
        return plan
    first = plan.candidates[0]
    if first.connections is None or first.connections <= most:
        return plan
    found: list[tuple[str, P]] = []
    for name in _few_modes(modes, target, first.connections, most):
        try:
            each = plan_over(name, plan.name)
        except ConfigurationError:  # of many hosts it may not fold over this mode
            continue
        if _bytes(each) < _bytes(plan) and seconds(each) <= seconds(plan) * MOST_FOR_FEW:
            found.append((name, each))
            if _count(each) <= most and seconds(each) <= seconds(plan) * HARDLY:
                break
    if not found:
        return plan
    mode, best = min(found, key=lambda each: (max(_count(each[1]), most), seconds(each[1])))
    reason = f"{best.reason}; over transport {mode!r} with {_made(best)}: without, {plan.name} takes"
    reason += f" {time_text(seconds(plan))} with {_made(plan)} ({target.why_few_connections})"
    return replace(best, transport=mode, reason=reason, candidates=(best.candidates[0], *_others(plan)))


def _few_modes(modes: Mapping[str, Target], target: Target, connections: int, most: int) -> list[str]:
    """Return the modes to predict for a schedule of so many connections: of those of pairs one, and those of batches.

    Of pairs the first that may keep to the advice, if any two ranks use all that they have; else the last, with fewest.
    """
    of_pairs = [name for name, mode in modes.items() if not mode.batching]
    few = [name for name in of_pairs if connections * _lanes(modes[name]) <= most * _lanes(target)]
    return [*(few or of_pairs[-1:])[:1], *(name for name, mode in modes.items() if mode.batching)]


def _lanes(target: Target) -> int:
    """Return the connections of two ranks that send each other both requests and partials."""
    return target.channels * (1 if target.pair_serial else 2)


def _others(plan: Plan | Forecast) -> Iterator[Candidate]:
    """Yield the other candidates of a plan, with what they take over the transport as it is."""
    for each in plan.candidates[1:]:
        many = each.connections is not None and each.connections > (plan.candidates[0].connections or 0)
        yield replace(each, reason=f"in more communicators: {each.reason}") if many else each


def _count(plan: Plan | Forecast) -> int:
    return plan.candidates[0].connections or 0


def _bytes(plan: Plan | Forecast) -> int:
    return plan.candidates[0].connection_bytes or 0


def _made(plan: Plan | Forecast) -> str:
    return f"{_count(plan)} communicators ({mb_text(_bytes(plan))})"
