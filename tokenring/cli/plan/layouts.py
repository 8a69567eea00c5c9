"""`tokenring plan --layout auto`: the layout is chosen together with the schedule, by the simulator.

Even work is not all: smaller chunks are smaller tiles, and a schedule such as Ulysses has even work in any layout.
Where kernels decide, the last percents of work do: then a balanced layout is compared with an evener one, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenring.cli.plan.options import Asked
from tokenring.display.units import time_text
from tokenring.planner.choosing.kept_plans import plan_or_forecast_kept
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.planner.layouts.balanced import EVEN, NAME, even_layout, may_pay_to_even
from tokenring.sequence.layout import contiguous, zigzag


def planned_in_layouts(asked: Asked, environment: Mapping[str, str]) -> tuple[Asked, Plan | Forecast, str]:
    """Return the call in the layout in which its fastest schedule is fastest, the plan, and a line about the others."""
    call = asked.call
    ranks, length = call.q_layout.world_size, call.q_layout.length
    usual = [make(ranks, length) for make in (zigzag, contiguous)]
    calls = [call, *(replace(call, q_layout=each, kv_layout=each) for each in usual if each.name != call.q_layout.name)]
    plans = [plan_or_forecast_kept(each, environment) for each in calls]
    times = _seconds(plans[0]), min(map(_seconds, plans))
    if call.q_layout.name == NAME and may_pay_to_even(call.mask, call.q_layout, *times):
        even = even_layout(call.mask, length, ranks, call.setting.interconnect.port_links)
        if even.name == EVEN:
            calls.append(replace(call, q_layout=even, kv_layout=even))
            plans.append(plan_or_forecast_kept(calls[-1], environment))
    ranked = sorted(range(len(calls)), key=lambda at: _seconds(plans[at]))
    found = [(calls[at].q_layout.name, _seconds(plans[at]), plans[at].candidates[0].name) for at in ranked]
    texts, best = [f"{layout} {time_text(seconds)} ({schedule})" for layout, seconds, schedule in found], ranked[0]
    return replace(asked, call=calls[best]), plans[best], f"layouts, each with its fastest schedule: {', '.join(texts)}"


def _seconds(plan: Plan | Forecast) -> float:
    return plan.candidates[0].predicted_seconds or 0.0
