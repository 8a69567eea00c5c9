"""How good the planner's choice is, beside a search that simulates every candidate to its end under the same prices.

    python benchmarks/choices.py [--every 7] [--ranks 2,4,8,16] [--tokens 8192,65536,1048576] [--presets NAMES]

Presets × the heads of ten models × lengths of the whole sequence × ranks, causal zigzag, forward and backward. Prints
each choice that takes longer than the best of the full search, then the largest ratio and what both searches took.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from model_heads import MODELS  # noqa: E402

from tokenring.cli.plan.options import first_ranks, several_hosts  # noqa: E402
from tokenring.errors import ConfigurationError  # noqa: E402
from tokenring.ir.schedule_data import PASSES  # noqa: E402
from tokenring.planner.choosing.auto import CallToPlan, make, plan_call  # noqa: E402
from tokenring.planner.interconnects.interconnect import Interconnect  # noqa: E402
from tokenring.planner.interconnects.wiring import interconnect_of  # noqa: E402
from tokenring.planner.machines.machine import machine_of_preset  # noqa: E402
from tokenring.planner.machines.presets import PRESETS, preset  # noqa: E402
from tokenring.planner.simulation.predict import Setting, predict  # noqa: E402
from tokenring.sequence.layout import make_layout  # noqa: E402
from tokenring.sequence.mask import Causal  # noqa: E402


def net_of(name: str, ranks: int) -> Interconnect:
    """Return the interconnect of a preset's first ranks, or those of several. Raises ConfigurationError."""
    of_many, _ = several_hosts(f"preset:{name}", ranks)
    return first_ranks(interconnect_of(preset(of_many)), ranks)


def calls(options: argparse.Namespace) -> Iterator[tuple[str, CallToPlan]]:
    """Yield what is planned for, with what it is called: every `--every`-th of all."""
    sizes = [int(each) for each in options.ranks.split(",")], [int(each) for each in options.tokens.split(",")]
    for at, (name, model, ranks, tokens) in enumerate(product(options.presets.split(","), MODELS.values(), *sizes)):
        if at % options.every:
            continue
        try:
            net = net_of(name, ranks)
        except ConfigurationError:  # such as half a preset of a whole rack
            continue
        machine = machine_of_preset(name, model.dtype, or_half=True)
        layout = make_layout("zigzag", ranks, tokens)
        setting = Setting(model.workload(tokens), net, machine, PASSES)
        yield f"{name}, {model.title}, {ranks} ranks, {tokens:,} tokens", CallToPlan(setting, layout, layout, Causal())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=7, help="take every so-many-th case")
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--tokens", default="8192,65536,1048576", help="of the whole sequence")
    parser.add_argument("--presets", default=",".join(PRESETS))
    ratios, spent = [], [0.0, 0.0]
    for title, call in calls(options := parser.parse_args()):
        found = []
        for at, everything in enumerate((False, True)):
            began = time.process_time()
            try:
                found.append(plan_call(replace(call, everything=everything)))
            except ConfigurationError as error:
                print(f"{title}: {error}")
            spent[at] += time.process_time() - began
        if len(found) < 2:
            continue
        best = min(each.predicted_seconds for each in found[1].candidates if each.predicted_seconds is not None)
        ratios.append(predict(make(call, found[0].name), call.setting).seconds / best)
        if ratios[-1] > 1.0005:
            print(f"{title}: {found[0].name} takes {ratios[-1]:.4f} × what the fastest takes", flush=True)
        if len(ratios) % 20 == 0:
            print(f"{len(ratios)} so far, largest {max(ratios):.4f}", file=sys.stderr, flush=True)
    if not ratios:
        sys.exit(f"no case of --presets {options.presets} has --ranks {options.ranks}")
    print(
        f"{len(ratios)} choices: median {statistics.median(ratios):.4f}, largest {max(ratios):.4f} × the fastest; "
        f"{spent[0]:.0f} s of the processor, {spent[1]:.0f} s with everything simulated"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
