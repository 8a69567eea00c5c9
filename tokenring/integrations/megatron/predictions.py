"""Times that a plan predicts."""

from __future__ import annotations

import math

from tokenring.planner.choosing.plan import Plan


def seconds_of(plan: Plan, name: str) -> float:
    """Return the planner's predicted seconds of a schedule; inf where it was not simulated, because it cannot win."""
    found = {each.name: each.predicted_seconds for each in plan.candidates}[name]
    return math.inf if found is None else found
