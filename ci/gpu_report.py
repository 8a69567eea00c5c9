"""ci/gpu: the figures that a GPU must reach, measured within eight minutes and shown in one table.

Each part is a module with `run(report)`, and runs in a process of its own with a time limit, so that one that crashes,
hangs or spoils the device loses its own lines only. `report(name, value, limit, met)` gives one line: met is None where
a line is for information. A part that is not here is said to be missing, and is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUDGET_SECONDS = 450.0  # of the eight minutes: imports and the start of CUDA are not in it
PREFIX = "@gpu "
# Module → the most seconds that it may take; what is left over goes to those after it.
PARTS = {"gpu_exact": 150.0, "gpu_times": 120.0, "gpu_merge": 40.0, "gpu_kernels": 90.0, "gpu_transports": 110.0}
NO_DEVICE = "no CUDA device here: nothing was measured (ci/gpu needs one, torch >= 2.11 and Triton)"

Report = Callable[[str, str, str, "bool | None"], None]


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    value: str
    limit: str = ""
    met: bool | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """0: all limits are met, or there is no device; 1: some are not, or some part came to no end."""
    options = _parser().parse_args(argv)
    if options.part:
        return run_part(options.part)
    device = _device()
    if device is None:
        print(NO_DEVICE)
        return 0
    names = options.only.split(",") if options.only else list(PARTS)
    print(f"{device}, Python {platform.python_version()}\n", flush=True)
    lines = run_parts(names, options.seconds)
    print(table(lines))
    if options.output:
        Path(options.output).write_text(json.dumps({"device": device, "lines": [asdict(x) for x in lines]}, indent=1))
    return 1 if any(line.met is False for line in lines) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ci/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PARTS", help=f"some of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="for all parts together")
    parser.add_argument("--output", metavar="FILE", help="write the table as JSON, too")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # a child process is asked so
    return parser


def _device() -> str | None:
    """The device and what drives it, asked in a process of its own; None where there is none."""
    ask = (
        "import torch; ok = torch.cuda.is_available() and torch.version.cuda is not None; "
        "print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}' if ok else '')"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120)
    said = done.stdout.strip()
    return said.splitlines()[-1] if said else None


# ---------- parts


def run_parts(names: Sequence[str], seconds: float) -> list[Line]:
    """The lines of all parts, in order; none takes longer than it may, and all together no longer than `seconds`."""
    deadline = time.monotonic() + seconds
    lines: list[Line] = []
    for name in names:
        left = deadline - time.monotonic()
        if importlib.util.find_spec(name) is None:
            lines.append(Line(name, "not in this checkout"))
        elif left <= 1:
            lines.append(Line(name, "no time was left", f"{seconds:.0f} s in all", False))
        else:
            lines += _run(name, min(left, PARTS.get(name, left)))
    return lines


def _run(name: str, limit_seconds: float) -> list[Line]:
    """The lines that a part gave, and one more if it came to no good end."""
    command = [sys.executable, str(HERE / "gpu"), "--part", name]
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=limit_seconds)
        wrong = "" if process.returncode == 0 else f"ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        _end(process)
        said, _ = process.communicate()
        wrong = f"no end within {limit_seconds:.0f} s"
    except BaseException:  # such as Ctrl-C, which another session does not hear
        _end(process)
        raise
    lines = [Line(**json.loads(text.removeprefix(PREFIX))) for text in said.splitlines() if text.startswith(PREFIX)]
    if wrong:
        others = [text for text in said.splitlines() if text.strip() and not text.startswith(PREFIX)]
        print("\n".join(others[-15:]), file=sys.stderr)
        lines.append(Line(name, f"{wrong}: {others[-1] if others else 'it said nothing'}", "", False))
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return lines


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it started: what it leaves behind would hold its output open, and the device."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own session, and so the number of its group


def run_part(name: str) -> int:
    """In a process of its own: the part's lines, as it finds them."""

    def report(name: str, value: str, limit: str = "", met: bool | None = None) -> None:
        print(PREFIX + json.dumps(asdict(Line(name, value, limit, met))), flush=True)

    try:
        importlib.import_module(name).run(report)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def guarded(report: Report, name: str, limit: str, measure: Callable[[], tuple[str, bool | None]]) -> None:
    """One line of a part; what is raised becomes its value, and the next line gets its turn."""
    try:
        value, met = measure()
    except Exception as error:
        traceback.print_exc()
        value, met = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", False
    report(name, value, limit, met)


def table(lines: Sequence[Line]) -> str:
    """As it is printed."""
    words = {True: "yes", False: "NO", None: ""}
    rows = [("what", "value", "limit", "met"), *((x.name, x.value, x.limit, words[x.met]) for x in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    made = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
    return "\n".join(line.rstrip() for line in made)
