"""Sweeps over lengths: a table and a picture of which schedule wins where."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tokenring.cli.plan.options import ask, several_hosts
from tokenring.cli.spelling import heads_text
from tokenring.display.svg import axis_step, box, heading, opening, style, text_at, wrapped
from tokenring.display.units import time_text
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.auto import plan_or_forecast, with_simulated
from tokenring.planner.choosing.candidates import BASELINE, SHOWN
from tokenring.planner.choosing.plan import Plan
from tokenring.sequence.sizes import SIZES

CURVES = 6  # that are drawn, unless more schedules win somewhere; further ones are dashed
WIDTH, MARGIN, LEFT, RIGHT, CHART, BAND = 900, 28, 82, 190, 300, 28
MOST = 2.0  # of the axis: what takes longer leaves the picture
COLOURS = {
    "paper": ("#ffffff", "#14181d"), "ink": ("#22282f", "#e8ecf0"), "grey": ("#66707b", "#9aa5b1"),
    "on": ("#ffffff", "#14181d"),
}  # fmt: skip
STROKES = {
    "c0": ("#2f6db5", "#3f7fcb"), "c1": ("#cf4a5e", "#e8687b"), "c2": ("#2f9e6b", "#3fb57f"),
    "c3": ("#a8740f", "#b98420"), "c4": ("#8f6cc0", "#a583d6"), "c5": ("#66707b", "#9aa5b1"),
    "rule": ("#dfe4e9", "#2c333b"),
}  # fmt: skip
BANDS = {f"w{number}": STROKES[f"c{number}"] for number in range(CURVES)}
RULES = [".curve { stroke-width: 2 } .more { stroke-dasharray: 6 4 }"]


@dataclass(frozen=True)
class Point:
    """One length: the times of what was simulated there, best first, and the lower bound."""

    tokens: int
    seconds: dict[str, float]
    bound_seconds: float

    @property
    def winner(self) -> str:
        """The fastest schedule at this length."""
        return next(iter(self.seconds))


def sweep(
    options: argparse.Namespace, first: int, last: int, status: Callable[[str], None]
) -> tuple[list[Point], dict[int, str]]:
    """Plan at every power of two from the first length to the last; return the plans, and why some lengths have none.

    Raises ConfigurationError if no length has one.
    """
    if first > last:
        raise ConfigurationError(f"--sweep {options.sweep}: the first length is the larger one")
    points: list[Point] = []
    skipped: dict[int, ConfigurationError] = {}
    tokens = first
    while tokens <= last:
        status(f"planning for {length_text(tokens)} tokens")
        try:
            points.append(_point(options, tokens))
        except ConfigurationError as error:
            skipped[tokens] = error
        tokens *= 2
    if not points:
        raise next(iter(skipped.values()))
    return points, {tokens: str(error) for tokens, error in skipped.items()}


def _point(options: argparse.Namespace, tokens: int) -> Point:
    asked = ask(argparse.Namespace(**{**vars(options), "seq": str(tokens)}))
    plan = plan_or_forecast(asked.call)
    plan = with_simulated(asked.call.in_mode(plan.transport), plan, SHOWN) if isinstance(plan, Plan) else plan
    times = {each.name: each.predicted_seconds for each in plan.candidates if each.predicted_seconds is not None}
    return Point(tokens, times, plan.candidates[0].bound_seconds or 0.0)


def length_text(tokens: int) -> str:
    """Return a number of tokens in short: 1048576 as 1M."""
    for letter, size in reversed(SIZES.items()):
        if tokens % size == 0:
            return f"{tokens // size}{letter}"
    return str(tokens)


def sweep_table(points: Sequence[Point], skipped: Mapping[int, str]) -> str:
    """Return a table with a line for each length, also for those that were not planned for."""
    lines = {tokens: f"{length_text(tokens):>8}  not planned: {why}" for tokens, why in skipped.items()}
    for point in points:
        best, *rest = point.seconds.items()
        ratio = f"{best[1] / point.bound_seconds:.2f}" if point.bound_seconds else ""
        text = f"{length_text(point.tokens):>8}  {time_text(best[1]):>9}  {ratio:>7}  {best[0]}"
        lines[point.tokens] = text + (f" ({rest[0][0]} {rest[0][1] / best[1]:.2f} ×)" if rest else "")
    head = f"{'tokens':>8}  {'time':>9}  {'× bound':>7}  schedule (the next)"
    return "\n".join([head, *(lines[tokens] for tokens in sorted(lines))])


def sweep_svg(points: Sequence[Point], options: argparse.Namespace) -> str:
    """Draw each schedule's time over the fastest one's at each length, and below it who wins there."""
    titles, below = heading(MARGIN, 38, WIDTH - 2 * MARGIN, _title(options), 17, [_about(options)])
    chart = _Chart(points, _names(points), below + 34)
    height = chart.bottom + 2 * BAND + MARGIN + 14
    lines = [*opening(WIDTH, height, _title(options)), *style(COLOURS | BANDS, STROKES, RULES)]
    lines += [box(0, 0, WIDTH, height, "paper"), *titles]
    return "\n".join([*lines, *chart.lines(), "</svg>"]) + "\n"


def _title(options: argparse.Namespace) -> str:
    return f"Fastest schedule by length on {several_hosts(options.topology, options.ranks)[0]}"


def _about(options: argparse.Namespace) -> str:
    dims = heads_text(options.dim, options.value_dim or options.dim)
    heads = f"{options.heads}:{options.kv_heads or options.heads} heads × {dims}"
    return f"{heads}, {options.dtype}, {options.mask}, {options.passes}: time over that of the fastest, predicted"


class _Chart:
    """Curves over a column for each length; the vertical axis is a ratio from 1 to MOST at most."""

    def __init__(self, points: Sequence[Point], names: Sequence[str], top: float) -> None:
        self.points, self.names, self.top = points, names, top
        self.bottom = top + CHART
        self.column = (WIDTH - LEFT - RIGHT) / len(points)
        self.most = min(MOST, max(1.1, *(_ratio(point, name) or 1.0 for point in points for name in names)))

    def x(self, index: int) -> float:
        """Return the middle of a column."""
        return LEFT + (index + 0.5) * self.column

    def y(self, ratio: float) -> float:
        """Return the height of a ratio; what is beyond the axis leaves the chart at its top."""
        return self.bottom - (ratio - 1) / (self.most - 1) * (self.bottom - self.top)

    def lines(self) -> Iterator[str]:
        """Yield axes, curves and the band of winners."""
        yield from self._axes()
        size = f'width="{WIDTH - LEFT - RIGHT}" height="{CHART + 6:g}"'
        yield f'<clipPath id="chart"><rect x="{LEFT}" y="{self.top - 3:.1f}" {size}/></clipPath>'
        yield '<g clip-path="url(#chart)">'
        for number, name in reversed(list(enumerate(self.names))):  # the winners on top
            yield from self._curve(_class(number), name)
        yield "</g>"
        yield from self._legend()
        yield from self._winners()

    def _axes(self) -> Iterator[str]:
        step = axis_step(self.most - 1, 6)
        for number in range(int((self.most - 1) / step + 1e-9) + 1):
            ratio = 1 + number * step
            yield f'<path class="rule" d="M{LEFT} {self.y(ratio):.1f}H{WIDTH - RIGHT}"/>'
            yield text_at(LEFT - 8, self.y(ratio) + 4, f"{ratio:g} ×", 11, "grey", "end")
        for index, point in enumerate(self.points):
            yield text_at(self.x(index), self.bottom + BAND + 20, length_text(point.tokens), 11, "grey", "middle")
        yield text_at(LEFT - 8, self.bottom + BAND + 20, "tokens", 11, "grey", "end")

    def _curve(self, kind: str, name: str) -> Iterator[str]:
        at = [(self.x(i), self.y(ratio)) for i, point in enumerate(self.points) if (ratio := _ratio(point, name))]
        path = " ".join(f"{'L' if i else 'M'}{a:.1f} {b:.1f}" for i, (a, b) in enumerate(at))
        yield f'<path class="{kind} curve" d="{path}"/>'
        for a, b in at:
            yield f'<circle class="{kind}" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>'

    def _legend(self) -> Iterator[str]:
        for number, name in enumerate(self.names):
            y = self.top + 6 + 18 * number
            yield f'<path class="{_class(number)} curve" d="M{WIDTH - RIGHT + 12} {y - 4:.1f}h14"/>'
            yield text_at(WIDTH - RIGHT + 31, y, name, 12)

    def _winners(self) -> Iterator[str]:
        """Yield a band in the winners' colours, each named once for all columns in a row that it wins."""
        yield text_at(LEFT - 8, self.bottom + BAND - 1, "fastest", 11, "grey", "end")
        first = 0
        for name, group in groupby(point.winner for point in self.points):
            columns = len(list(group))
            x, width = LEFT + first * self.column, columns * self.column
            first += columns
            yield box(x, self.bottom + 10, width, BAND - 6, f"w{self.names.index(name) % CURVES}")
            label = wrapped(name, width - 8, 11)
            if len(label) == 1:
                yield text_at(x + width / 2, self.bottom + BAND - 1, name, 11, "on", "middle")


def _class(number: int) -> str:
    """Return the class of a curve: its colour, and dashes where all colours are taken."""
    return f"c{number % CURVES}" + (" more" if number >= CURVES else "")


def _ratio(point: Point, name: str) -> float | None:
    """Return how many times as long as the fastest a schedule takes; None where it was not simulated."""
    return point.seconds[name] / point.seconds[point.winner] if name in point.seconds else None


def _names(points: Sequence[Point]) -> list[str]:
    """Return the winners, and up to CURVES in all the baseline and the schedules that are nearest to them."""
    winners = list(dict.fromkeys(point.winner for point in points))
    others: dict[str, list[float]] = {}
    for point in points:
        for name, seconds in point.seconds.items():
            others.setdefault(name, []).append(seconds / point.seconds[point.winner])
    known = [name for name in others if name not in winners and len(others[name]) == len(points)]
    rest = sorted(known, key=lambda name: (name != BASELINE, sum(others[name])))
    return (winners + rest)[: max(CURVES, len(winners))]
