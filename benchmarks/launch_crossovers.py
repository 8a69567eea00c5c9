"""Show where launches decide: the schedule taken for each length, and the one taken if launches were free.

    python benchmarks/launch_crossovers.py [--preset atlas-800t-a2] [--ranks 8 16] [--tokens 1k..16k] [--svg FOLDER]

32:8 heads × 128, bf16, causal, zigzag, forward and backward. Free: launches, posts, and the device's time for an
operator's start. The last column is the time of that schedule over the time of the one taken, launches priced in both.
`--svg` draws every schedule's time over the fastest one's, for each number of ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from tokenring.cli.plan.command import options_parser  # noqa: E402
from tokenring.cli.plan.options import ask  # noqa: E402
from tokenring.cli.plan.sweep import Point, length_text, sweep, sweep_svg  # noqa: E402
from tokenring.display.units import time_text  # noqa: E402
from tokenring.planner.choosing.auto import CallToPlan, make, plan_call  # noqa: E402
from tokenring.planner.simulation.predict import predict  # noqa: E402
from tokenring.sequence.sizes import read_size  # noqa: E402
from tokenring.tables.rates import Machine  # noqa: E402


def free_launches(machine: Machine) -> Machine:
    """Return the machine with a host and a device for which the start of an operator or a message costs nothing."""
    rates = replace(machine.rates, launching=None, op_seconds=0.0, call_seconds=0.0)
    return replace(machine, rates=rates, messages=replace(machine.messages, post_seconds=0.0))


def row(call: CallToPlan, taken: Point) -> str:
    """Return the line of one length."""
    free = replace(call, setting=replace(call.setting, machine=free_launches(call.setting.machine)))
    other = plan_call(free).name
    seconds = taken.seconds[taken.winner]
    priced = predict(make(call, other), call.setting).seconds
    text = f"| {call.setting.interconnect.world_size} | {length_text(taken.tokens)} | `{taken.winner}` | "
    text += f"{time_text(seconds)} | {seconds / taken.bound_seconds:.2f} | "
    return text + ("the same | |" if other == taken.winner else f"`{other}` | {priced / seconds:.2f} |")


def table(asked: argparse.Namespace, first: int, last: int) -> Iterator[str]:
    """Yield the lines for all lengths and numbers of ranks; draw the pictures on the way."""
    yield "| ranks | tokens | taken | time | × bound | with free launches | its time, × |"
    yield "|---:|---:|---|---:|---:|---|---:|"
    for ranks in asked.ranks:
        what = ["--topology", f"preset:{asked.preset}", "--ranks", str(ranks), "--heads", "32", "--kv-heads", "8"]
        options = options_parser().parse_args([*what, "--sweep", f"seq={first}..{last}"])
        points, _ = sweep(options, first, last, lambda text: None)
        for point in points:
            yield row(ask(argparse.Namespace(**{**vars(options), "seq": str(point.tokens)})).call, point)
        if asked.svg is not None:
            (asked.svg / f"launches-{ranks}.svg").write_text(sweep_svg(points, options), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="atlas-800t-a2")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--tokens", default="1k..16k")
    parser.add_argument("--svg", type=Path)
    asked = parser.parse_args()
    first, _, last = asked.tokens.partition("..")
    for line in table(asked, read_size("--tokens", first), read_size("--tokens", last)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
