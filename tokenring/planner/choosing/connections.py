"""Plans that were not chosen here, kept to the connections that a rank may have: for those, too, modes are taken."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from tokenring.backends.registry import automatic, modes_of
from tokenring.lowering.backend_names import transport_target

if TYPE_CHECKING:
    from tokenring.launch.groups import Held
    from tokenring.lowering.target import Target
    from tokenring.planner.choosing.plan import Plan
    from tokenring.schedule.schedule import GivenSchedule

P = TypeVar("P", "Plan", "GivenSchedule")


def within_connections(plan: P, asked: object, group: Held | None, device: torch.device) -> P:
    """Return a plan that was not chosen here, over the first mode of transport "auto" in which it keeps to a limit.

    The plan itself where it keeps to it anyway, and where it does so in no mode: then the transport refuses it. Where
    there is no limit, so it is kept to what the transport advises, if that takes no more memory; nothing is refused.
    asked: for which transport.
    """
    modes = modes_of(asked, group, device)
    if not modes or group is None:
        return plan
    from tokenring.lowering.footprint import most_connected

    target = transport_target(automatic(group, device))
    advised = target.most_connections is None
    most = target.advised_connections if advised else target.most_connections
    if most is None or (many := most_connected(plan.schedule, target)) <= most:
        return plan
    most_bytes = many * target.connection_bytes if advised else math.inf

    def fits(mode: Target) -> bool:
        count = most_connected(plan.schedule, mode)
        return count <= most and count * mode.connection_bytes <= most_bytes

    mode = next((name for name, each in modes.items() if fits(each)), None)
    if mode is None:
        return plan
    return replace(plan, transport=mode, reason=f"{plan.reason}; over transport {mode!r}: {target.why_few_connections}")
