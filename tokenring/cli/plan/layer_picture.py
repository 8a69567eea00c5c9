"""The plan of a transformer layer as a picture: a bar for each operator, one after another on one clock.

Narrow and in large type, so that it can be read on a phone as it can on a desk.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenring.cli.plan.layer import PlannedLayer
from tokenring.cli.plan.layer_report import about, group_text, result, title
from tokenring.display.svg import axis_step, box, heading, opening, style, text_at, wrapped
from tokenring.display.units import time_text
from tokenring.planner.layers.layer import OperatorCost

WIDTH, MARGIN, ROW, BAR, BAND, LEGEND = 620, 24, 46, 14, 30, 22
TYPE = 14  # size of letters
LABEL = 370  # room for what an operator is, beside its times
LEAST_BAR = 0.8  # so that what takes microseconds is seen
PARTS = {"compute": "kernels", "work": "copies, sums, launches", "exposed": "exposed: nothing hides it"}
COLOURS = {  # class: (light, dark)
    "paper": ("#ffffff", "#14181d"), "ink": ("#22282f", "#e8ecf0"), "grey": ("#66707b", "#9aa5b1"),
    "forward": ("#eef3fa", "#1c2530"), "backward": ("#faf3ea", "#2a241c"), "compute": ("#2f6db5", "#3f7fcb"),
    "work": ("#2f9e6b", "#3fb57f"), "exposed": ("#f3b33d", "#e0a63a"),
}  # fmt: skip
STROKES = {"rule": ("#dfe4e9", "#2c333b")}


def layer_svg(planned: PlannedLayer) -> str:
    """Return the picture as SVG."""
    return "\n".join(_lines(planned)) + "\n"


def parts_of(cost: OperatorCost) -> dict[str, float]:
    """Return the seconds of each part of an operator's bar, in the order in which they are drawn."""
    work = max(0.0, cost.seconds - cost.compute_seconds - cost.exposed_seconds)
    return {"compute": cost.seconds - work - cost.exposed_seconds, "work": work, "exposed": cost.exposed_seconds}


def _lines(planned: PlannedLayer) -> Iterator[str]:
    costs, name = planned.plan.costs, title(planned.asked)
    titles, below = heading(MARGIN, 38, WIDTH - 2 * MARGIN, name, 19, [*about(planned.asked)[:1], result(planned)])
    passes = list(dict.fromkeys(each.direction for each in costs))
    top = below + 18
    bottom = top + ROW * len(costs) + BAND * len(passes)
    height = bottom + 34 + LEGEND * len(PARTS) + MARGIN - 8
    yield from opening(WIDTH, height, name)
    yield from style(COLOURS, STROKES)
    yield box(0, 0, WIDTH, height, "paper")
    yield from titles
    scale = (WIDTH - 2 * MARGIN) / planned.plan.seconds
    y, began = top, 0.0
    for direction in passes:
        of_pass = [each for each in costs if each.direction == direction]
        yield box(MARGIN - 10, y, WIDTH - 2 * MARGIN + 20, BAND + ROW * len(of_pass), direction)
        total = time_text(sum(each.seconds for each in of_pass))
        yield text_at(MARGIN, y + 21, f"{direction}, {total}", TYPE, weight="bold")
        y += BAND
        for each in of_pass:
            yield from _row(planned, each, y, MARGIN + began * scale, scale)
            y, began = y + ROW, began + each.seconds
    yield from _axis(planned.plan.seconds * 1e3, scale / 1e3, top, bottom)
    for number, (part, text) in enumerate(PARTS.items()):
        yield box(MARGIN, bottom + 34 + number * LEGEND, 14, 14, part)
        yield text_at(MARGIN + 22, bottom + 46 + number * LEGEND, text, TYPE)
    yield "</svg>"


def _row(planned: PlannedLayer, cost: OperatorCost, y: float, x: float, scale: float) -> Iterator[str]:
    """Yield one operator: what it is, above its bar."""
    times = f"{time_text(cost.seconds)}, {time_text(cost.exposed_seconds)} exposed"
    name = f"{cost.operator}: {cost.schedule}"
    texts = [name, f"{name}, {group_text(planned.asked, cost.kind)}"]
    text = max((each for each in texts if len(wrapped(each, LABEL, TYPE)) == 1), key=len, default=cost.operator)
    yield text_at(MARGIN, y + 14, text, TYPE)
    yield text_at(WIDTH - MARGIN, y + 14, times, TYPE, "ink", "end")
    for part, seconds in parts_of(cost).items():
        if seconds > 0:
            yield box(x, y + 21, max(LEAST_BAR, seconds * scale), BAR, part)
        x += seconds * scale


def _axis(end_ms: float, scale: float, top: float, bottom: float) -> Iterator[str]:
    step = axis_step(end_ms, 6)
    for number in range(int(end_ms / step) + 1):
        x = MARGIN + number * step * scale
        yield f'<path class="rule" d="M{x:.1f} {bottom:.1f}v6"/>'
        yield text_at(x, bottom + 20, f"{number * step:g}" + ("" if number else " ms"), TYPE - 1, "grey", "middle")
