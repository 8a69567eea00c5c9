"""Sweeps over lengths: a table and a picture of which schedule wins where."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log10

from tokenring.cli.plan.options import ask, several_hosts
from tokenring.display.svg import box, opening, style, text_at
from tokenring.display.units import time_text
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.auto import plan_or_forecast
from tokenring.sequence.sizes import SIZES

CURVES = 6  # schedules that are drawn
WIDTH, HEIGHT, MARGIN, LEFT, RIGHT, TOP = 900, 460, 28, 74, 190, 64
COLOURS = {
    "paper": ("#ffffff", "#14181d"), "ink": ("#22282f", "#e8ecf0"), "grey": ("#66707b", "#9aa5b1"),
    "won": ("#eef3fa", "#1c2530"),
}  # fmt: skip
STROKES = {
    "c0": ("#2f6db5", "#3f7fcb"), "c1": ("#cf4a5e", "#e8687b"), "c2": ("#2f9e6b", "#3fb57f"),
    "c3": ("#f3b33d", "#e0a63a"), "c4": ("#8f6cc0", "#a583d6"), "c5": ("#66707b", "#9aa5b1"),
    "rule": ("#dfe4e9", "#2c333b"),
}  # fmt: skip


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
    """Draw time over length, both in logarithms, of what wins somewhere and of what comes near."""
    names = _names(points)
    low = min(min(point.seconds.values()) for point in points)
    high = max(point.seconds[name] for point in points for name in names if name in point.seconds)
    span = max(log10(high / low), 0.3)

    def x(index: int) -> float:
        return LEFT + index * (WIDTH - LEFT - RIGHT) / max(1, len(points) - 1)

    def y(seconds: float) -> float:
        return HEIGHT - MARGIN - 24 - log10(seconds / low) / span * (HEIGHT - MARGIN - 24 - TOP)

    title = f"Fastest schedule by length on {several_hosts(options.topology, options.ranks)[0]}"
    lines = [*opening(WIDTH, HEIGHT, title), *style(COLOURS, STROKES, [".curve { stroke-width: 2 }"])]
    lines += [box(0, 0, WIDTH, HEIGHT, "paper"), text_at(MARGIN, 30, title, 17, weight="bold")]
    heads = f"{options.heads}:{options.kv_heads or options.heads} heads × {options.dim}"
    about = f"{heads}, {options.dtype}, {options.mask}, {options.passes}"
    lines.append(text_at(MARGIN, 48, about, 12, "grey"))
    for index, point in enumerate(points):
        lines.append(text_at(x(index), HEIGHT - MARGIN, length_text(point.tokens), 11, "grey", "middle"))
    for power in range(int(log10(low)) - 1, int(log10(high)) + 2):
        if low <= 10.0**power <= high:
            at = y(10.0**power)
            lines.append(f'<path class="rule" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
            lines.append(text_at(LEFT - 8, at + 4, time_text(10.0**power), 11, "grey", "end"))
    lines += _curves(points, names, x, y)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _names(points: Sequence[Point]) -> list[str]:
    """Return the winners, then the schedules that are nearest to them: CURVES in all, at most."""
    winners = list(dict.fromkeys(point.winner for point in points))
    others: dict[str, list[float]] = {}
    for point in points:
        for name, seconds in point.seconds.items():
            others.setdefault(name, []).append(seconds / point.seconds[point.winner])
    rest = sorted((name for name in others if name not in winners and len(others[name]) == len(points)),
                  key=lambda name: sum(others[name]))  # fmt: skip
    return (winners + rest)[:CURVES]


def _curves(
    points: Sequence[Point], names: Sequence[str], x: Callable[[int], float], y: Callable[[float], float]
) -> list[str]:
    lines = []
    labels: list[tuple[float, str, int]] = []
    for number, name in enumerate(names):
        at = [(x(i), y(point.seconds[name])) for i, point in enumerate(points) if name in point.seconds]
        path = " ".join(f"{'L' if i else 'M'}{a:.1f} {b:.1f}" for i, (a, b) in enumerate(at))
        lines.append(f'<path class="c{number} curve" d="{path}"/>')
        lines += [f'<circle class="c{number}" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in at]
        labels.append((at[-1][1], name, number))
    low = 0.0
    for height, name, number in sorted(labels):
        low = max(low + 15, height)
        lines.append(f'<path class="c{number} curve" d="M{WIDTH - RIGHT + 8} {low - 4:.1f}h14"/>')
        lines.append(text_at(WIDTH - RIGHT + 27, low, name, 12))
    return lines
