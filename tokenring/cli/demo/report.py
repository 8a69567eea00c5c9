"""The demo's text, made from results."""

from __future__ import annotations

from collections.abc import Sequence

from tokenring.cli.demo.results import (
    ENDS,
    GRADIENT_LIMIT,
    LOSS_LIMIT,
    Checked,
    DemoMeasured,
    Pass,
    Started,
    first_and_last,
    training_complaint,
)
from tokenring.cli.trace.picture import Timeline
from tokenring.display.console import Ink

BAR_WIDTH = 44
PARTS = {  # of a call's time: what a reader calls it, and how the bar shows it
    "compute": ("compute", "█"),
    "exposed": ("exposed communication", "▒"),
    "rest": ("rest: merge, pack, post", "░"),
}


def headline(ranks: int, tokens: int, layout: str) -> str:
    """Return the line that says what is run."""
    return f"tokenring demo: a transformer on one sequence of {tokens:,} tokens, split over {_ranks(ranks)} ({layout})"


def setting(started: Started, machine: str) -> str:
    """Describe the model, the text and the machine."""
    return (
        f"{started.parameters:,} parameters in {started.layers} layers, {started.q_heads} query heads on "
        f"{started.kv_heads} kv heads of {started.head_dim}, fp32; bytes of English, {started.text_bytes:,} of them\n"
        f"{machine}, one thread a rank; torch {started.torch}"
    )


def section(number: int, title: str, ink: Ink) -> str:
    """Return a heading."""
    return f"\n{ink.bold(f'{number}  {title}')}"


def check_text(checked: Checked, ranks: int, ink: Ink) -> str:
    """Describe the comparison with one process."""
    name, error = checked.worst
    count = len(checked.gradient_errors)
    rows = [
        (f"loss        {checked.split_loss:.7f} split, {checked.whole_loss:.7f} whole", checked.loss_error, LOSS_LIMIT),
        (f"gradients   of {count} parameters, worst {name}", error, GRADIENT_LIMIT),
    ]
    lines = [
        f"   {text:<58} error {found:.1e}   limit {limit:.0e}  {_mark(found <= limit, ink)}"
        for text, found, limit in rows
    ]
    how = f"{_ranks(ranks)} against one process with torch's own attention; relative errors; {checked.seconds:.1f} s"
    return "\n".join([*lines, "   " + ink.pale(how)])


def training_text(losses: Sequence[float], tokens: int, seconds: float, steps: int, ink: Ink) -> str:
    """Return how far the loss fell, in how many steps and how many seconds."""
    first, last = first_and_last(losses)
    done = len(losses)
    stopped = "" if done == steps else f" of {steps} (time was up)"
    return (
        f"   loss {first:.3f} → {last:.3f} (means of the first and last {ENDS} steps)  "
        f"{_mark(training_complaint(losses) is None, ink)}\n"
        + "   "
        + ink.pale(f"{done} steps{stopped} in {seconds:.0f} s, {done * tokens / seconds:,.0f} tokens/s")
    )


def schedule_text(measured: DemoMeasured) -> str:
    """Return the schedule, and why it was chosen."""
    return f"   schedule   {measured.schedule}\n   why        {measured.reason}"


def bytes_text(measured: DemoMeasured, ink: Ink) -> str:
    """Return a matrix of links for each pass."""
    matrices = [link_matrix(each, ink) for each in measured.passes]
    equal = measured.complaint() is None
    legend = "✓ counted by the transport, equal to the schedule's prediction to the byte"
    if not any(sent for each in measured.passes for row in each.counted_bytes for sent in row):
        legend = "nothing moves"
    return "\n\n".join(matrices) + "\n   " + ink.pale(legend if equal else "✗ counted (predicted)")


def link_matrix(each: Pass, ink: Ink) -> str:
    """Return the bytes that each rank sent to each other in one pass, as lines."""
    cells = [
        [_cell(wanted, found) for wanted, found in zip(predicted, counted, strict=True)]
        for predicted, counted in zip(each.predicted_bytes, each.counted_bytes, strict=True)
    ]
    for rank, row in enumerate(cells):
        row[rank] = "·"
    width = max(12, *(len(cell) for row in cells for cell in row)) + 2
    lines = [f"   {f'bytes, {each.name}':<18}" + "".join(f"{f'to {rank}':>{width}}" for rank in range(len(cells)))]
    for rank, row in enumerate(cells):
        painted = "".join(_paint_cell(f"{cell:>{width}}", ink) for cell in row)
        lines.append(f"   {f'from {rank}':<18}" + painted)
    return "\n".join(lines)


def _cell(wanted: int, found: int) -> str:
    if wanted != found:
        return f"{found:,} ({wanted:,}) ✗"
    return f"{found:,} ✓" if found else "0 ✓"


def _paint_cell(cell: str, ink: Ink) -> str:
    if cell.endswith("✓"):
        return cell[:-1] + ink.good("✓")
    return ink.bad(cell) if cell.endswith("✗") else ink.pale(cell)


def split_text(measured: DemoMeasured, ranks: int, cores: int, ink: Ink) -> str:
    """Return the parts of the time of each pass."""
    lines = [f"   {f'time, mean of {_ranks(ranks)}':<24}" + "".join(f"{each.name:>16}" for each in measured.passes)]
    totals = [sum(each.split_seconds.values()) for each in measured.passes]
    for part, (name, glyph) in PARTS.items():
        cells = [
            _time_cell(each.split_seconds[part], total) for each, total in zip(measured.passes, totals, strict=True)
        ]
        lines.append(f"   {f'{glyph} {name}':<24}" + "".join(f"{cell:>16}" for cell in cells))
    lines.append("")
    lines += [f"   {each.name:<9} {stacked_bar(each.split_seconds)}" for each in measured.passes]
    if ranks > cores:
        lines.append("   " + ink.pale(f"{ranks} ranks share {cores} cores: every part includes time without a core"))
    return "\n".join(lines)


def _time_cell(seconds: float, total: float) -> str:
    share = seconds / total if total else 0.0
    return f"{1e3 * seconds:,.1f} ms {share:5.0%}"


def stacked_bar(split_seconds: dict[str, float]) -> str:
    """Return the parts of a pass as one bar; its glyphs are shared out so that they always fill it."""
    total = sum(split_seconds.values())
    text, until = "", 0.0
    for part, (_, glyph) in PARTS.items():
        until += split_seconds[part]
        end = round(BAR_WIDTH * until / total) if total else 0
        text += glyph * (end - len(text))
    return text


def timeline(measured: DemoMeasured, title: str) -> Timeline:
    """Return the timeline that the picture of the call shows."""
    heading = "One attention call on every rank, forward and backward"
    about = [f"schedule {measured.schedule} · {title}"]
    ranks = len(measured.passes[0].counted_bytes)
    return Timeline(heading, about, ranks, measured.stretches, measured.bars, measured.messages)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _mark(fine: bool, ink: Ink) -> str:
    return ink.good("✓") if fine else ink.bad("✗")
