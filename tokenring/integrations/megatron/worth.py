"""Comparison of a schedule of ours with an attention that is there already: whether it saves enough to replace it."""

from __future__ import annotations

import logging

import torch.distributed as dist

from tokenring.display.units import time_text
from tokenring.integrations.megatron.contexts import Contexts
from tokenring.integrations.megatron.options import SCHEDULE
from tokenring.integrations.megatron.predictions import seconds_of
from tokenring.sequence.workload import Request

LOG = logging.getLogger("tokenring")


def saves_too_little(
    contexts: Contexts, schedule: str, request: Request, own: str, worth: float, whose: str
) -> bool:
    """Tell whether the planner's choice saves less than the share `worth` of the time of `own`.

    own: our name for what is there already; whose: its name in the log, as "MindSpeed's own". All ranks of the group
    call this together, and rank 0 logs the result.
    """
    plan = contexts.context(schedule, request.device).agreed_plan(request)
    own_plan = contexts.context(f"auto:{own}", request.device).agreed_plan(request)
    best_seconds, own_seconds = seconds_of(plan, plan.name), seconds_of(own_plan, own)
    stays = (saved := 1 - best_seconds / own_seconds) < worth
    contexts.announce(schedule, request)  # also where ours does not run
    if dist.get_rank() == 0:
        text = f"{plan.name} is predicted to take {time_text(best_seconds)}, {whose} algorithm ({own}) "
        text += f"{time_text(own_seconds)}; {saved:.1%} saved, {worth:.0%} are worth a change"
        text += f": {whose} stays (to force it: {SCHEDULE} {plan.name})" if stays else ""
        LOG.log(logging.WARNING if stays else logging.INFO, text)
    return stays
