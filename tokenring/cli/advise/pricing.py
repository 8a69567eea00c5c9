"""The predicted time of a call as an engine runs it: what `tokenring advise` says, and its benchmark compares."""

from __future__ import annotations

from dataclasses import replace

from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.auto import CallToPlan, forecast_call, make
from tokenring.planner.simulation.predict import predict


def choice_seconds(call: CallToPlan, schedule: str) -> float:
    """Return the predicted seconds of a call by the schedule that moves a choice's blocks.

    Raises ConfigurationError if the schedule does not fit the call.
    """
    try:
        return predict(make(call, schedule), call.setting).seconds
    except ConfigurationError:
        found = forecast_call(replace(call, families=(schedule,))).candidates[0].predicted_seconds
        if found is None:
            raise
        return found
