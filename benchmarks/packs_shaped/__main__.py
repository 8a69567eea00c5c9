"""Race layouts of packed documents on shaped links: our own choice, zigzag, and the layouts of MagiAttention's solver.

    sudo MAGI_SRC=... python benchmarks/packs_shaped [--packs 3] [--ranks 8] [--length 65536] [--ratios 5,1,0.2]

Each rank has a network namespace of its own (a full mesh); kernels sleep for the time of a given rate. Each layout runs
with the schedule that the planner chooses for it; ours is the layout that `tokenring plan --layout auto` chooses, and
its schedule. A ratio is the time that the busiest wire of our schedule needs, over the mean time of the kernels.
All layouts of a pack run in turns; a time is the median over rounds of the slowest rank's. Prints the times of each
pack, and at the end ours over the best of Magi's settings and over zigzag's: largest and geometric mean for each ratio.
Needs root and a quiet machine; Magi's layouts need an unpacked `magi_attention` folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import torch  # noqa: E402
from packs import DRAWS, TABLE, from_table, magi_solver, pack  # noqa: E402

from tokenring.emulate import Emulated  # noqa: E402
from tokenring.emulate.shapes import Shape  # noqa: E402
from tokenring.ir.schedule_data import PASSES  # noqa: E402
from tokenring.lowering.backend_names import transport_target  # noqa: E402
from tokenring.lowering.footprint import FLOPS_PER_PAIR  # noqa: E402
from tokenring.planner.bounds.mask_density import visible_pairs  # noqa: E402
from tokenring.planner.choosing.auto import CallToPlan, plan_call  # noqa: E402
from tokenring.planner.choosing.plan import Plan  # noqa: E402
from tokenring.planner.interconnects.emulated import interconnect_of_shape, sleeping_machine  # noqa: E402
from tokenring.planner.layouts.balanced import balanced_layout, even_layout  # noqa: E402
from tokenring.planner.simulation.predict import Setting, busiest  # noqa: E402
from tokenring.sequence.layout import Layout, contiguous, zigzag  # noqa: E402
from tokenring.sequence.mask import Mask  # noqa: E402
from tokenring.sequence.workload import Workload  # noqa: E402

PATHS = f"{REPO}:{HERE}:{REPO / 'benchmarks' / 'cells'}"
NO_COMPUTE_TFLOPS, CORES = 1e6, 2.0
LIMIT_SECONDS = 900.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=3, help="of each distribution")
    parser.add_argument("--lengths", default="", help="distributions of lengths, joined by commas; all")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--length", type=int, default=65536, help="positions in a pack")
    parser.add_argument("--ratios", default="5,1,0.2", help="transfer over compute, joined by commas")
    parser.add_argument("--port-gbit", type=float, default=0.2, help="of a rank, over all its links")
    parser.add_argument("--heads", default="8:2", help="query heads and kv heads")
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--passes", choices=("forward", "forward+backward"), default="forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--families", default="direct-kv,all-gather-kv,ulysses", help="that the planner chooses from")
    parser.add_argument("--dry", action="store_true", help="print predicted times only")
    return parser.parse_args()


class Race:
    """One pack at one ratio: the layouts, the plan of each, and the rate of the kernels."""

    def __init__(self, options: argparse.Namespace, shape: Shape, mask: Mask, layouts: dict[str, Layout], ratio: float):
        heads, kv_heads = map(int, options.heads.split(":"))
        self.options, self.shape, self.mask, self.layouts = options, shape, mask, layouts
        self.passes = PASSES if options.passes == "forward+backward" else PASSES[:1]
        self.size = Workload(1, options.length, options.length, heads, kv_heads, options.head_dim, torch.float32)
        wires = self._own(NO_COMPUTE_TFLOPS)
        a_pair = sum(FLOPS_PER_PAIR[each] for each in self.passes) * heads * options.head_dim
        pairs = visible_pairs(mask, options.length, options.length) / shape.ranks
        self.tflops = float(f"{a_pair * pairs / (wires / ratio) / 1e12:.4g}")
        self.plans = {name: self.plan(layout, self.tflops) for name, layout in layouts.items()}

    def setting(self, tflops: float) -> Setting:
        machine = sleeping_machine(tflops, self.shape, cores=CORES)
        net = interconnect_of_shape(self.shape)
        return Setting(self.size, net, machine, self.passes, target=transport_target("gloo"))

    def plan(self, layout: Layout, tflops: float) -> Plan:
        families = tuple(self.options.families.split(","))
        return plan_call(CallToPlan(self.setting(tflops), layout, layout, self.mask, families=families))

    def _own(self, tflops: float) -> float:
        """Return the seconds of the busiest wire of our own layout and schedule."""
        best = min((self.plan(self.layouts[name], tflops) for name in OURS if name in self.layouts), key=seconds)
        return busiest(best.schedule, self.setting(tflops)).seconds

    @property
    def chosen(self) -> str:
        """Name of the layout that we choose."""
        return min((name for name in OURS if name in self.plans), key=lambda name: seconds(self.plans[name]))

    def measured(self, net: Emulated) -> dict[str, float]:
        """Return the median seconds of each layout."""
        runs = {
            name: {"layout": layout.name, "chunks": [list(each) for each in layout.chunks], "owners": layout.owners,
                   "schedule": self.plans[name].name}
            for name, layout in self.layouts.items()
        }  # fmt: skip
        job = {
            "mask": str(self.mask), "length": self.options.length, "q_heads": self.size.q_heads, "runs": runs,
            "kv_heads": self.size.kv_heads, "head_dim": self.size.head_dim, "tflops": self.tflops,
            "passes": self.options.passes, "rounds": self.options.rounds,
        }  # fmt: skip
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(job, file)
            file.flush()
            environment = {"PYTHONPATH": PATHS, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            lines = net.run("packs_worker", [file.name], LIMIT_SECONDS, environment=environment, show=lambda line: None)
        found: dict[str, list[float]] = json.loads(next(line for line in lines if line.startswith("{")))
        return {name: statistics.median(each) for name, each in found.items()}


OURS = ("balanced", "even", "zigzag", "contiguous")  # what `tokenring plan --layout auto` compares, if it differs


def seconds(plan: Plan) -> float:
    return plan.candidates[0].predicted_seconds or 0.0


def layouts_of(mask: Mask, length: int, ranks: int, links: int, magi: Any) -> dict[str, Layout]:
    """Return our layouts and the distinct ones of Magi's settings, by name. links: of a rank's port."""
    found = {"balanced": balanced_layout(mask, length, ranks, links=links), "zigzag": zigzag(ranks, length),
             "contiguous": contiguous(ranks, length)}  # fmt: skip
    even = even_layout(mask, length, ranks, links)
    if even != found["balanced"]:
        found["even"] = even
    seen = set()
    for name, layout in magi(mask, length, ranks) if magi else ():
        if (key := (len(layout.chunks), layout.owners)) not in seen:
            seen.add(key)
            found[f"Magi {name}"] = replace(layout, name=f"magi-{name.replace(', ', '-').replace(' ', '-')}")
    return found


def ratios_of(race: Race, times: dict[str, float]) -> tuple[float | None, float]:
    """Return our time over the best of Magi's layouts, and over zigzag's."""
    ours = times[race.chosen]
    theirs = [value for name, value in times.items() if name.startswith("Magi")]
    return (ours / min(theirs) if theirs else None), ours / times["zigzag"]


def show(race: Race, times: dict[str, float], predicted: dict[str, float]) -> None:
    for name in sorted(times, key=times.__getitem__):
        mark = " <- ours" if name == race.chosen else ""
        schedule = race.plans[name].name
        print(f"    {name:18} {schedule:28} {1e3 * times[name]:8.1f} ms (predicted {1e3 * predicted[name]:.1f}){mark}")


def main() -> int:
    options = parse()
    folder = os.environ.get("MAGI_SRC")
    magi, draws = (magi_solver(Path(folder)) if folder else None), dict(DRAWS)
    if folder and (Path(folder) / TABLE).exists():
        draws = {"Magi's table": from_table(Path(folder) / TABLE), **draws}
    wanted = options.lengths.split(",") if options.lengths else list(draws)
    shape = Shape("full-mesh", options.ranks, round(options.port_gbit / (options.ranks - 1), 4))
    links = interconnect_of_shape(shape).port_links
    found: dict[float, list[tuple[float | None, float]]] = {}
    with Emulated(shape.kind, shape.ranks, shape.link_gbit) as net:
        for name in wanted:
            for seed in range(options.packs):
                mask = pack(draws[name], options.length, seed)
                layouts = layouts_of(mask, options.length, options.ranks, links, magi)
                for ratio in map(float, options.ratios.split(",")):
                    began = time.monotonic()
                    race = Race(options, shape, mask, layouts, ratio)
                    predicted = {each: seconds(plan) for each, plan in race.plans.items()}
                    times = predicted if options.dry else race.measured(net)
                    result = ratios_of(race, times)
                    found.setdefault(ratio, []).append(result)
                    said = "none" if result[0] is None else f"{result[0]:.3f}"
                    took = time.monotonic() - began
                    what = f"{name}, pack {seed}, transfer/compute {ratio:g}: ours {race.chosen}"
                    print(f"{what}, over Magi's best {said}, over zigzag {result[1]:.3f} ({took:.0f} s)", flush=True)
                    show(race, times, predicted)
    for ratio, results in found.items():
        print(f"transfer/compute {ratio:g}, {len(results)} packs: " + summary(results))
    return 0


def summary(results: list[tuple[float | None, float]]) -> str:
    theirs, usual = [each for each, _ in results if each], [each for _, each in results]
    named = [(name, each) for name, each in (("Magi's best", theirs), ("zigzag", usual)) if each]
    mean = statistics.geometric_mean
    return "; ".join(f"over {name}: geometric mean {mean(each):.3f}, largest {max(each):.3f}" for name, each in named)


if __name__ == "__main__":
    sys.exit(main())
