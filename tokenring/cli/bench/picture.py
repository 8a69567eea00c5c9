"""A report as a self-contained SVG: bars for medians, whiskers from the fastest to the slowest round, dots for all."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from tokenring.cli.bench.results import ONE, OURS, PEER, WRONG, Entry, RaceReport
from tokenring.cli.bench.table import bytes_text, case_text, emulation_text, machine_text, ms, what_text
from tokenring.display.svg import axis_step, heading, opening, style, text_at, wrapped

# Sizes in SVG units, which viewers show as pixels.
WIDTH, MARGIN, RIGHT = 1080, 28, 160
HEAD, ROW, BAR, AXIS, LINE = 32, 44, 20, 46, 17
CHARACTER = 6.6  # mean width of a character of 12 units, generous
SPREAD = (0.0, 2.6, -2.6, 5.2, -5.2)  # of dots, so that they do not hide each other
KINDS = {OURS: ("ours", "tokenring"), PEER: ("peer", "other libraries"), ONE: ("one", "one process, not split")}
COLOURS = {  # class: (light, dark)
    "ground": ("#ffffff", "#14181d"),
    "ink": ("#22282f", "#e8ecf0"),
    "grey": ("#66707b", "#9aa5b1"),
    "ours": ("#2f6db5", "#5b9be8"),
    "peer": ("#e0912f", "#e0a04a"),
    "one": ("#98a2ad", "#77828e"),
    "bad": ("#c43d4b", "#f0808a"),
    "dot": ("#ffffff", "#14181d"),
}
LINES = {"rule": ("#e3e7eb", "#2c333b"), "whisker": ("#22282f", "#e8ecf0")}
RULES = [".whisker { stroke-width: 1.3 } .dot { stroke: #77828e; stroke-width: 0.8 }"]


def to_svg(report: RaceReport) -> str:
    """Return the picture of a report as SVG."""
    return "\n".join(_Picture(report).lines()) + "\n"


class _Picture:
    def __init__(self, report: RaceReport) -> None:
        self.report = report
        self.timed = [entry for entry in report.ranked if entry.was_timed]
        self.footer = [line for text in report.reasons() for line in wrapped(text, WIDTH - 2 * MARGIN, 11)]
        self.most = max((max(entry.call_s) for entry in self.timed), default=1e-3)
        labels = [*(entry.name for entry in self.timed), *map(what_text, self.timed), "tokenring"]
        self.left = MARGIN + CHARACTER * max(map(len, labels)) + 14
        self.label = WIDTH - RIGHT + 18.0
        self.heading, below = self._heading()
        self.top = below + HEAD
        self.bottom = self.top + ROW * len(self.timed)
        self.height = self.bottom + AXIS + LINE * len(self.footer) + MARGIN // 2

    def x(self, seconds: float) -> float:
        return self.left + seconds / self.most * (WIDTH - RIGHT - self.left)

    def lines(self) -> Iterator[str]:
        title = f"tokenring bench: {case_text(self.report.case)}"
        yield from opening(WIDTH, self.height, title)
        yield from style(COLOURS, LINES, RULES)
        yield f'<rect class="ground" width="{WIDTH}" height="{self.height}"/>'
        yield from self.heading
        yield from self._kinds()
        yield from self._axis()
        for row, entry in enumerate(self.timed):
            yield from self._row(self.top + row * ROW, entry)
        yield from self._footer()
        yield "</svg>"

    def _heading(self) -> tuple[list[str], float]:
        case = self.report.case
        passes = "forward and backward" if case.backward else "forward"
        title = f"Attention split over {self.report.machine.ranks} ranks, {passes}"
        where = "; ".join(filter(None, [machine_text(self.report.machine), emulation_text(case)]))
        return heading(MARGIN, 40, WIDTH - 2 * MARGIN, title, 19, [case_text(case).partition(", ")[2], where])

    def _kinds(self) -> Iterator[str]:
        x = self.left
        for name, text in KINDS.values():
            if any(KINDS[entry.kind][0] == name for entry in self.timed):
                yield f'<rect class="{name}" x="{x:.1f}" y="{self.top - 17:g}" width="13" height="11" rx="2"/>'
                yield text_at(x + 19, self.top - 7, text, 12)
                x += 19 + CHARACTER * len(text) + 22
        yield text_at(x, self.top - 7, "bars: medians, dots: rounds, whiskers: from fastest to slowest", 12, "grey")

    def _axis(self) -> Iterator[str]:
        step = axis_step(1e3 * self.most, 10)
        for number in range(int(1e3 * self.most / step) + 1):
            x = self.x(number * step / 1e3)
            yield f'<line class="rule" x1="{x:.1f}" y1="{self.top + 2:g}" x2="{x:.1f}" y2="{self.bottom + 4}"/>'
            yield text_at(x, self.bottom + 19, f"{number * step:g}", 11, "grey", "middle")
        yield text_at(self.label, self.bottom + 19, "ms, the slowest rank's", 11, "grey")

    def _row(self, top: float, entry: Entry) -> Iterator[str]:
        middle = top + ROW / 2
        name = KINDS[entry.kind][0]
        yield text_at(self.left - 12, middle - 3, entry.name, 13, "ink", "end", "bold" if entry.kind == OURS else "")
        yield text_at(self.left - 12, middle + 12, what_text(entry), 11, "grey", "end")
        width = self.x(entry.median_s) - self.left
        faint = ' opacity="0.35"' if entry.status == WRONG else ""
        yield (
            f'<rect class="{name}" x="{self.left:.1f}" y="{middle - BAR / 2:.1f}" width="{width:.1f}" '
            f'height="{BAR}" rx="2"{faint}><title>{escape(self._tip(entry))}</title></rect>'
        )
        first, last = self.x(min(entry.call_s)), self.x(max(entry.call_s))
        yield f'<path class="whisker" d="M{first:.1f} {middle:.1f}H{last:.1f}{_ends(first, last, middle)}"/>'
        for number, seconds in enumerate(entry.call_s):
            y = middle + SPREAD[number % len(SPREAD)]
            yield f'<circle class="dot" cx="{self.x(seconds):.1f}" cy="{y:.1f}" r="1.9"/>'
        yield text_at(self.label, middle - 2, f"{ms(entry.median_s)} ms", 13, "ink", weight="bold")
        yield self._verdict(entry, middle + 12)

    def _verdict(self, entry: Entry, y: float) -> str:
        x = self.label
        base, ratio = self.report.base, self.report.ratio(entry)
        if entry.status == WRONG:
            return text_at(x, y, f"wrong: error {entry.worst_error:.0e}", 11, "bad", weight="bold")
        if base is None or ratio is None:
            return ""
        named = "best peer" if base.kind == PEER else "fastest"
        return text_at(x, y, f"the {named}" if entry is base else f"{ratio:.2f} × {named}", 11, "grey")

    def _tip(self, entry: Entry) -> str:
        parts = [f"{entry.name} ({what_text(entry)}): {ms(entry.median_s)} ms"]
        parts += [f"{ms(min(entry.call_s))} to {ms(max(entry.call_s))} ms"]
        parts[-1] += f", error {entry.worst_error:.1e}" if self.report.reference else ", not checked"
        parts += [] if entry.link_bytes is None else [f"{bytes_text(entry.link_bytes)} on the busiest link"]
        return "; ".join(parts)

    def _footer(self) -> Iterator[str]:
        for row, line in enumerate(self.footer):
            yield text_at(MARGIN, self.bottom + AXIS + LINE * row, line, 11, "grey")


def _ends(first: float, last: float, middle: float) -> str:
    return "".join(f"M{x:.1f} {middle - 5:.1f}V{middle + 5:.1f}" for x in (first, last))
