"""How long planning takes, and how much memory, by the number of hosts; and where the straight line is checked.

    python ci/plan_scale.py [--preset hgx-h100] [--hosts 4 8 ... 512] [--tokens 4096] [--svg docs/plan-scale.svg]

Each plan is made in a process of its own: seconds include starting Python and importing torch.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from tokenring.svg import box, opening, style, text_at  # noqa: E402

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hgx-h100")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--tokens", type=int, default=4096, help="a rank")
    parser.add_argument("--ranks-a-host", type=int, default=8)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    found: list[tuple[int, float]] = []
    print(f"{'hosts':>6} {'ranks':>6} {'seconds':>8} {'MB':>6}  plan")
    for hosts in options.hosts:
        ranks = hosts * options.ranks_a_host
        command = [sys.executable, "-m", "tokenring", "plan", "--topology", f"preset:{options.preset}*{hosts}"]
        command += ["--seq", str(options.tokens * ranks), "--heads", "64", "--kv-heads", "8", "--json"]
        began = time.perf_counter()
        try:
            done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=MOST_SECONDS)
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
