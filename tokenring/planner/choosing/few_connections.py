"""Plans with few connections, where a transport advises that and the time allows it: HCCL's take gigabytes.

A mode of the transport makes fewer connections of two ranks for the same schedule; its messages share queues. Where the
chosen schedule would make more than `Target.advised_connections` at a rank, it is predicted over such modes, and one
that costs little time is taken. Advice refuses nothing: where no mode does, the plan stays as it is.
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


def with_few_connections(
    plan: P, setting: Setting, limit_bytes: int | None, modes: Mapping[str, Target], plan_over: Callable[[str, str], P]
) -> P:
    """Return the plan, or the same schedule over a mode with as few connections as are advised.

    plan_over: plans the call over a mode with a schedule, both by their names. Within a limit nothing changes. Of the
    modes that cost little time and less memory, the first that keeps to the advice is taken, else the one with fewest.
    """
    most = setting.target.advised_connections
    if most is None or limit_bytes is not None or _count(plan) <= most:
        return plan
    mode: str | None = None
    best = plan
    for name in _few_modes(modes, setting.target, _count(plan), most):
        try:
            found = plan_over(name, plan.name)
        except ConfigurationError:  # of many hosts it may not fold over this mode
            continue
        if _bytes(found) < _bytes(best) and seconds(found) <= seconds(plan) * MOST_FOR_FEW:
            mode, best = name, found
            if _count(found) <= most:
                break
    if mode is None:
        return plan
    reason = f"{best.reason}; over transport {mode!r} with {_made(best)}: without, {plan.name} takes"
    reason += f" {time_text(seconds(plan))} with {_made(plan)} ({setting.target.why_few_connections})"
    candidates = best.candidates[0], *_others(plan, f"without {mode!r}")
    return replace(best, transport=mode, reason=reason, candidates=candidates)


def _few_modes(modes: Mapping[str, Target], target: Target, connections: int, most: int) -> list[str]:
    """Return the modes to predict for a schedule of so many connections: the first that may do, and those after it.

    All are of pairs, those with most connections first. Batches, in which messages wait for each other as no simulation
    knows, are taken for limits alone.
    """
    of_pairs = [name for name, mode in modes.items() if not mode.batching]
    few = [name for name in of_pairs if connections * _lanes(modes[name]) <= most * _lanes(target)]
    return of_pairs[of_pairs.index(few[0]) :] if few else of_pairs[-1:]


def _lanes(target: Target) -> int:
    """Return the connections of two ranks that send each other both requests and partials: no two have more."""
    return target.channels * (1 if target.pair_serial else 2)


def _others(plan: Plan | Forecast, judged: str) -> Iterator[Candidate]:
    """Yield the other candidates of a plan: what is said of them was found without the mode."""
    for each in plan.candidates[1:]:
        predicted = each.predicted_seconds is not None
        yield replace(each, reason=f"{judged}: {each.reason}") if predicted else each


def _count(plan: Plan | Forecast) -> int:
    return plan.candidates[0].connections or 0


def _bytes(plan: Plan | Forecast) -> int:
    return plan.candidates[0].connection_bytes or 0


def _made(plan: Plan | Forecast) -> str:
    return f"{_count(plan)} communicators ({mb_text(_bytes(plan))})"
