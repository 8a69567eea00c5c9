"""A simulated schedule as a timeline: the same pictures and traces as of a real call."""

from __future__ import annotations

from collections.abc import Sequence

from tokenring.cli.trace.chrome import chrome
from tokenring.cli.trace.picture import Timeline, to_svg
from tokenring.cli.trace.record import Bar, Stretch, TracedMessage
from tokenring.display.units import time_text
from tokenring.ir.schedule_data import Pass
from tokenring.planner.simulation.predict import Prediction, Setting
from tokenring.planner.simulation.simulate import TimeSpan

KINDS = {"kernel": "compute", "copy": "merge", "wait": "wait"}
LABELS = {"kernel": "attention of {}", "copy": "{}", "wait": "waiting for {}"}


def timeline(name: str, setting: Setting, prediction: Prediction) -> Timeline:
    """Return the timeline of a prediction that was recorded; its passes follow one another."""
    stretches: list[Stretch] = []
    bars: list[Bar] = []
    messages: list[TracedMessage] = []
    at = 0.0
    for direction, outcome in zip(setting.passes, prediction.outcomes, strict=True):
        end = at + outcome.seconds
        stretches += [Stretch(rank, direction, at, end) for rank in range(setting.interconnect.world_size)]
        bars += [_bar(span, direction, at) for span in outcome.spans if span.what in KINDS]
        messages += [_message(span, direction, at) for span in outcome.spans if span.what == "transfer"]
        at = end
    bars.sort(key=lambda bar: (bar.rank, bar.began))
    heading = f"Schedule {name}, simulated on {setting.interconnect.name}, {setting.interconnect.world_size} ranks"
    about = [f"{time_text(prediction.seconds)} predicted, {' and '.join(setting.passes)}", setting.machine.source]
    return Timeline(heading, about, setting.interconnect.world_size, stretches, bars, messages)


def _bar(span: TimeSpan, direction: Pass, at: float) -> Bar:
    label = LABELS[span.what].format(span.label)
    began, ended = at + span.begin_seconds, at + span.end_seconds
    return Bar(span.rank, direction, KINDS[span.what], label, str(span.step), began, ended, span.step, span.what)


def _message(span: TimeSpan, direction: Pass, at: float) -> TracedMessage:
    began, ended = at + span.begin_seconds, at + span.end_seconds
    return TracedMessage(span.src, span.rank, span.label, began, ended, began, direction)


def drawn(path: str, made: Timeline, about: Sequence[str] = ()) -> str:
    """Return the timeline in the format of a file of this name: SVG, or a trace for Perfetto and chrome://tracing."""
    if path.lower().endswith(".json"):
        return chrome(made, {"schedule": made.heading, "prediction": "; ".join([*made.about, *about])})
    return to_svg(made)
