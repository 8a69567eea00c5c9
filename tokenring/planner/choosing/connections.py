"""Plans that were not chosen here, kept to the connections that a rank may have: for those, too, modes are taken."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from tokenring.backends.registry import automatic, modes_of
from tokenring.lowering.backend_names import transport_target

if TYPE_CHECKING:
    from tokenring.launch.groups import Held
    from tokenring.planner.choosing.plan import Plan
    from tokenring.schedule.schedule import GivenSchedule

P = TypeVar("P", "Plan", "GivenSchedule")


def within_connections(plan: P, asked: object, group: Held | None, device: torch.device) -> P:
    """Return a plan that was not chosen here, over the first mode of transport "auto" in which it keeps to a limit.

    The plan itself where there is no limit, where it keeps to it anyway, and where it does so in no mode: then the
    transport refuses it. asked: for which transport.
    """
    modes = modes_of(asked, group, device)
    if not modes or group is None:
        return plan
    from tokenring.lowering.footprint import most_connected

    target = transport_target(automatic(group, device))
    most = target.most_connections
    if most is None or most_connected(plan.schedule, target) <= most:
        return plan
    mode = next((name for name, each in modes.items() if most_connected(plan.schedule, each) <= most), None)
    if mode is None:
        return plan
    return replace(plan, transport=mode, reason=f"{plan.reason}; over transport {mode!r}: {target.why_few_connections}")
