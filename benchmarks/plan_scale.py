"""How long planning takes, and how much memory, by the number of hosts; or how straight the line is that is drawn.

    python benchmarks/plan_scale.py [--preset hgx-h100] [--hosts 4 8 ... 512] [--tokens 4096]
        [--svg docs/plan-scale.svg]
    python benchmarks/plan_scale.py --line --hosts 16 32 64

Each plan is made in a process of its own: seconds include starting Python and importing torch. --line: of each schedule
that folds, what is drawn out from 2 and 4 hosts against folding all, forward and backward, as a share of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import torch  # noqa: E402

from tokenring.display.svg import box, opening, style, text_at  # noqa: E402
from tokenring.planner.choosing.scale_out import FEW_HOSTS, Task, figures  # noqa: E402
from tokenring.planner.interconnects.wiring import interconnect_of  # noqa: E402
from tokenring.planner.machines.machine import machine_of_preset  # noqa: E402
from tokenring.planner.machines.presets import preset  # noqa: E402
from tokenring.planner.simulation.predict import Setting  # noqa: E402
from tokenring.sequence.workload import Workload  # noqa: E402

STRAIGHT = ("ring", "tokenring", "bidirectional", "usp/8", "double-ring/8", "relay/8", "reduced/8")

MOST_SECONDS = 590  # of a plan
WIDTH, HEIGHT, MARGIN = 560, 340, 56
COLOURS = {
    "paper": ("#ffffff", "#14181d"), "ink": ("#22282f", "#e8ecf0"), "grey": ("#66707b", "#9aa5b1"),
    "dot": ("#2f6db5", "#3f7fcb"),
}  # fmt: skip
LINES = {"rule": ("#dfe4e9", "#2c333b"), "curve": ("#2f6db5", "#3f7fcb")}


def picture(found: list[tuple[int, float]], preset: str) -> str:
    """Seconds by ranks, both in logarithms."""
    (few, _), (many, _) = min(found), max(found)
    seconds = [took for _, took in found]
    low, high = 10 ** math.floor(math.log10(min(seconds))), 10 ** math.ceil(math.log10(max(seconds)))

    def x(ranks: float) -> float:
        return MARGIN + math.log(ranks / few) / math.log(many / few) * (WIDTH - 2 * MARGIN)

    def y(took: float) -> float:
        return HEIGHT - MARGIN - math.log(took / low) / math.log(high / low) * (HEIGHT - 2 * MARGIN)

    title = f"Seconds to plan, by ranks ({preset}, with Python's start)"
    lines = [*opening(WIDTH, HEIGHT, title), *style(COLOURS, LINES), box(0, 0, WIDTH, HEIGHT, "paper")]
    lines.append(text_at(MARGIN, 30, title, 15, weight="bold"))
    tick = low
    while tick <= high:
        lines.append(f'<path class="rule" d="M{MARGIN} {y(tick):.1f}H{WIDTH - MARGIN}"/>')
        lines.append(text_at(MARGIN - 8, y(tick) + 4, f"{tick:g}", 11, "grey", "end"))
        tick *= 10
    lines.append(f'<path class="curve" fill="none" d="M{"L".join(f"{x(n):.1f} {y(took):.1f}" for n, took in found)}"/>')
    for ranks, took in found:
        lines.append(f'<circle class="dot" cx="{x(ranks):.1f}" cy="{y(took):.1f}" r="3.5"/>')
        lines.append(text_at(x(ranks), y(took) - 9, f"{took:.1f}", 10, "grey", "middle"))
        lines.append(text_at(x(ranks), HEIGHT - MARGIN + 18, f"{ranks}", 11, "grey", "middle"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def off_the_line(name: str, hosts: int, options: argparse.Namespace) -> float:
    """By how much the line through 2 and 4 hosts misses what folding all of them gives, as a share of that."""
    net = interconnect_of(preset(f"preset:{options.preset}*{hosts}"))
    length = options.tokens * net.world_size
    size, machine = Workload(1, length, length, 64, 8, 128), machine_of_preset(options.preset, torch.bfloat16)
    whole = Task(Setting(size, net, machine, ("forward", "backward")), share=0.5, most_tiles=sys.maxsize)
    folded, drawn = (figures(name, task, FEW_HOSTS, math.inf) for task in (whole, replace(whole, most_tiles=0)))
    return math.nan if folded is None or drawn is None else drawn.seconds / folded.seconds - 1


def lines(options: argparse.Namespace) -> int:
    """How straight the line is."""
    print(f"{'schedule':16}" + "".join(f"{hosts:6} hosts" for hosts in options.hosts))
    for name in STRAIGHT:
        missed = (off_the_line(name, hosts, options) for hosts in options.hosts)
        print(f"{name:16}" + "".join(f"{each:+12.4%}" for each in missed), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hgx-h100")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--tokens", type=int, default=4096, help="a rank")
    parser.add_argument("--ranks-a-host", type=int, default=8)
    parser.add_argument("--line", action="store_true")
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    if options.line:
        return lines(options)
    found: list[tuple[int, float]] = []
    print(f"{'hosts':>6} {'ranks':>6} {'seconds':>8} {'MB':>6}  plan")
    for hosts in options.hosts:
        ranks = hosts * options.ranks_a_host
        command = [sys.executable, "-m", "tokenring", "plan", "--topology", f"preset:{options.preset}*{hosts}"]
        command += ["--seq", str(options.tokens * ranks), "--heads", "64", "--kv-heads", "8", "--json"]
        began = time.perf_counter()
        try:
            anew = {**os.environ, "TOKENRING_PLAN_CACHE": "off"}
            done = subprocess.run(command, cwd=REPO, env=anew, capture_output=True, text=True, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{hosts:6} {ranks:6} over {MOST_SECONDS} s: not planned", flush=True)
            continue
        seconds = time.perf_counter() - began
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3  # of the largest so far
        if done.returncode:
            print(f"{hosts:6} {ranks:6} {seconds:8.1f} {memory:6.0f}  failed: {done.stderr.strip()}")
            continue
        print(f"{hosts:6} {ranks:6} {seconds:8.1f} {memory:6.0f}  {json.loads(done.stdout)['reason'][:90]}", flush=True)
        found.append((ranks, seconds))
    if options.svg is not None and found:
        options.svg.write_text(picture(found, options.preset), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
