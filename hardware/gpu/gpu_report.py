"""ci/gpu: the figures that a GPU must reach, measured within eight minutes and shown in one table.

Each part is a module with `run(report)`, and runs in a process of its own with a time limit, so that one that crashes,
hangs or spoils the device loses its own lines only. `report(name, value, limit, met)` gives one line: met is None where
a line is for information. A part whose `run` has an argument `seconds` is told how long it may take. What a part
leaves of its time goes to those after it. A part that is not here is said to be missing, and is no failure.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from gpu_child import LINES, Ended, Line, give, run_child, taken

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
BUDGET_SECONDS = 465.0  # of the eight minutes, from the very start; the rest is for ending what hangs
DEVICE_SECONDS = 60.0  # for torch to name the device
LEAVE_SECONDS = 4.0  # that a part which is told its time has left when it should be done
# Module → the seconds that those before it leave it, whatever they do. It may take all that those after it can spare.
PARTS = {"gpu_transports": 140.0, "gpu_exact": 90.0, "gpu_kernels": 80.0, "gpu_merge": 30.0, "gpu_times": 100.0}
NO_DEVICE = "no CUDA device here: nothing was measured (ci/gpu needs one, torch >= 2.11 and Triton)"
NO_TIME = "no time was left"
ASK = """import torch
if torch.cuda.is_available() and torch.version.cuda is not None:
    print(f"device: {torch.cuda.get_device_name()}, torch {torch.__version__}")
"""

Report = Callable[[str, str, str, "bool | None"], None]


def main(argv: Sequence[str] | None = None) -> int:
    """0: all limits are met, or there is no device; 1: some are not, or some part, or torch, came to no good end."""
    deadline, options = time.monotonic(), _parser().parse_args(argv)
    if options.part:
        return run_part(options.part, options.until)
    deadline += options.seconds
    device, trouble = _device(min(DEVICE_SECONDS, options.seconds))
    if device is None and not trouble:
        print(NO_DEVICE)
        return 0
    print(f"{device or 'no device'}, Python {platform.python_version()}\n", flush=True)
    names = options.only.split(",") if options.only else list(PARTS)
    lines = [Line("torch and its device", trouble, "", False)] if trouble else []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # parts are ended, too
    try:
        for line in () if trouble else each_line(names, deadline - time.monotonic()):
            lines.append(line)
    finally:  # whatever came: what was found is shown
        signal.signal(signal.SIGTERM, before)
        print(table(lines), flush=True)
        if options.output:
            text = json.dumps({"device": device, "lines": [asdict(x) for x in lines]}, indent=1)
            Path(options.output).write_text(text, encoding="utf-8")
    return 1 if any(line.met is False for line in lines) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ci/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PARTS", help=f"some of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="for all parts together")
    parser.add_argument("--output", metavar="FILE", help="write the table as JSON, too")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # a child process is asked so
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # by the monotonic clock, which it shares
    return parser


def _device(seconds: float) -> tuple[str | None, str]:
    """The device and what drives it, and what is wrong; asked in a process of its own. None and "": there is none."""
    asked = run_child([sys.executable, "-c", ASK], os.environ, seconds, lambda text: None)
    if asked.wrong:
        return None, f"{asked.wrong}: {asked.last}"
    named = [text for text in asked.words if text.startswith("device: ")]
    return (named[-1].removeprefix("device: ") if named else None), ""


# ---------- parts

Run = Callable[[str, float], Iterator[Line]]


def run_parts(names: Sequence[str], seconds: float) -> list[Line]:
    """The lines of all parts, in order; all together take no longer than `seconds`."""
    return list(each_line(names, seconds))


def each_line(
    names: Sequence[str], seconds: float, run: Run | None = None, now: Callable[[], float] = time.monotonic
) -> Iterator[Line]:
    """The lines of the parts, as they come. run: one part, with the seconds that it may take."""
    deadline, run = now() + seconds, run or _run
    here = [name for name in names if importlib.util.find_spec(name) is not None]
    for name in names:
        if name not in here:
            yield Line(name, "not in this checkout")
            continue
        here.remove(name)
        left = deadline - now()
        if left <= 1:
            yield Line(name, NO_TIME, f"{seconds:.0f} s in all", False)
        else:
            yield from run(name, limit_seconds(name, here, left, seconds))


def limit_seconds(name: str, later: Sequence[str], left: float, whole: float = BUDGET_SECONDS) -> float:
    """What a part may take: what is left but for what those after it are sure of, or else what it is sure of itself.

    whole: for all parts; what each is sure of is less where that is less than usual.
    """
    scale = min(1.0, whole / BUDGET_SECONDS)
    spared = left - scale * sum(PARTS.get(each, 0.0) for each in later)
    return max(spared, min(left, scale * PARTS.get(name, 1.0)))


def _run(name: str, limit_seconds: float) -> Iterator[Line]:
    """The lines that a part gave, and one more if it came to no good end."""
    began, lines, broken, counts = time.monotonic(), list[Line](), list[str](), list[int]()

    def heard(text: str) -> None:
        try:
            said = taken(text)
        except ValueError as error:
            broken.append(str(error))
            return
        if isinstance(said, int):
            counts.append(said)
            return
        lines.append(said)
        print(f"  {shown(said.name)}: {shown(said.value)}", flush=True)  # at once, whatever comes after it

    command = [sys.executable, str(REPO / "ci" / "gpu"), "--part", name, "--until", f"{began + limit_seconds:.3f}"]
    ended = run_child(command, _environment(), limit_seconds, heard)
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    yield from lines
    if wrong := trouble_of(ended, len(lines), counts, broken):
        for text in ended.words:
            print(text, file=sys.stderr)
        yield Line(name, wrong, "", False)


def trouble_of(ended: Ended, lines: int, counts: Sequence[int], broken: Sequence[str]) -> str:
    """What is wrong with how a part ended, or "". counts: how many lines it says it gave, once, at its end."""
    if ended.wrong:
        return f"{ended.wrong}: {ended.last}"
    if broken:
        return f"{len(broken)} of its lines cannot be read: {broken[0]}"
    if not counts:
        return f"it left before its end: {ended.last}"
    if counts != [lines]:
        return f"{lines} lines came, of the {counts[-1]} that it gave"
    return "" if lines else f"it measured nothing: {ended.last}"


def _environment() -> dict[str, str]:
    paths = [str(HERE), str(REPO), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run_part(name: str, until: float | None = None) -> int:
    """In a process of its own: the part's lines, as it finds them. until: when it must be done."""
    descriptor = int(os.environ.pop(LINES, "1"))  # none of the processes that it starts has it
    count = 0

    def report(name: str, value: str, limit: str = "", met: bool | None = None) -> None:
        nonlocal count
        give(descriptor, Line(str(name), str(value), str(limit), None if met is None else bool(met)))
        count += 1

    try:
        run = importlib.import_module(name).run
        told: dict[str, float] = {}
        if until is not None and "seconds" in inspect.signature(run).parameters:
            told["seconds"] = max(1.0, until - time.monotonic() - LEAVE_SECONDS)
        run(report, **told)
    except Exception:
        traceback.print_exc()
        return 1
    give(descriptor, count)
    return 0


# ---------- lines


class Shares:
    """The time for some lines, one after another: each gets its share of what those before it have left."""

    def __init__(self, seconds: float, lines: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._deadline, self._lines = now, now() + seconds, lines

    def next(self) -> float:
        """Seconds for the next line; none, or less, when time is up."""
        self._lines -= 1
        return (self._deadline - self._now()) / max(1, self._lines + 1)


def guarded(
    report: Report, name: str, limit: str, measure: Callable[[], tuple[str, bool | None]], seconds: float = 1.0
) -> None:
    """One line of a part; what is raised becomes its value, and the next line gets its turn.

    seconds: that are left for it; with none it is not measured, and says so.
    """
    if seconds <= 0:
        report(name, NO_TIME, limit, False)
        return
    try:
        value, met = measure()
    except Exception as error:
        traceback.print_exc()
        value, met = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", False
    report(name, value, limit, met)


def table(lines: Sequence[Line]) -> str:
    """As it is printed."""
    words = {True: "yes", False: "NO", None: ""}
    made = [(shown(x.name), shown(x.value), shown(x.limit), words[x.met]) for x in lines]
    rows = [("what", "value", "limit", "met"), *made]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    texts = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]
    return "\n".join(text.rstrip() for text in texts)


def shown(text: str) -> str:
    """On one line, without what a terminal would obey."""
    return "".join(each if each.isprintable() else " " for each in text)
