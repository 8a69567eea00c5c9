"""What ranks that share this machine's cores add to the time that links need: `Overheads` of interconnects/emulated.py.

    sudo python benchmarks/cells/calibrate.py [--file /tmp/overheads.json]

Runs a few schedules of four and eight ranks over links so wide, with kernels so fast, that only overheads are left, and
over shaped ones, where overheads are partly hidden; then finds the constants with which the simulator fits these times
best, by trying one after another. No cell of the campaign is looked at: other widths, other lengths. Prints the
constants and how well they fit. With --file the measurements are kept, and read if they are there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests" / "support"), str(HERE)]

import torch  # noqa: E402
from grid import CORES, HEAD_DIM, link_gbit  # noqa: E402
from shaped import measured  # noqa: E402

from tokenring.emulate import Emulated  # noqa: E402
from tokenring.emulate.shapes import MOST_GBIT, Shape  # noqa: E402
from tokenring.ir.schedule_data import PASSES  # noqa: E402
from tokenring.lowering.backend_names import transport_target  # noqa: E402
from tokenring.lowering.calls import anything  # noqa: E402
from tokenring.lowering.lower import agenda_of, lower_agenda  # noqa: E402
from tokenring.lowering.storage import storage_of  # noqa: E402
from tokenring.planner.interconnects.emulated import OVERHEADS, Overheads, interconnect_of_shape  # noqa: E402
from tokenring.planner.simulation import operations  # noqa: E402
from tokenring.planner.simulation.simulate import simulate  # noqa: E402
from tokenring.schedule.names import named_schedule  # noqa: E402
from tokenring.sequence.layout import make_layout  # noqa: E402
from tokenring.sequence.mask import parse_mask  # noqa: E402
from tokenring.sequence.workload import Workload  # noqa: E402
from tokenring.tables.rates import Rates  # noqa: E402

WIDE_GBIT = 5.0  # at which whatever is sent here is in a link's bucket: it passes for free
FAST_TFLOPS = 1e6
ROUNDS = 7
SHAPED_GBIT = 0.08
SHAPED_TOKENS = 64  # a rank
SCHEDULES = (
    "ring", "ring/pieces4", "bidirectional", "tokenring", "direct-kv", "direct-kv/pieces4", "direct-q", "all-gather-kv",
    "ulysses", "ulysses/pieces2", "usp/2", "mesh-kv/2x{half}", "tiles/2x{half}", "sub-sharded/1x1x{ranks}",
)  # fmt: skip
MORE = (
    "direct-q/pieces4", "ulysses/pieces4", "usp/2/pieces2", "sub-sharded/2x1x{half}", "sub-sharded/2x1x{half}/pieces2",
)  # fmt: skip
STEPS = (2.0, 1.6, 1.4, 1.25, 1.15, 1.1)  # by how much a constant is changed, from round to round


@dataclass(frozen=True)
class Case:
    """A measured call: what a rank does in each pass, and the median seconds of the slowest rank.

    shape: None where nothing on the links takes time.
    """

    name: str
    ranks: int
    shape: Shape | None
    passes: list[list[list[Any]]]  # pass → rank → operations, or (operations of copying, bytes copied)
    seconds: float


def measure() -> list[dict[str, Any]]:
    """Every schedule at two sizes, with many heads and one KV head, forward and with backward; and on shaped links."""
    found = [each for kind in ("full-mesh", "switch") for ranks in (4, 8) for each in shaped(kind, ranks)]
    for ranks in (4, 8):
        names = [name.format(half=ranks // 2, ranks=ranks) for name in SCHEDULES]
        with Emulated("full-mesh", ranks, WIDE_GBIT) as net:
            for kv_heads, tokens, passes in ((h, t, p) for h in (8, 1) for t in (16, 96) for p in (1, 2)):
                cell = job(names, tokens * ranks, passes, kv_heads)
                found.append({**cell, "ranks": ranks, "found": measured(net, cell, 300.0)["seconds"]})
    return found


def shaped(kind: str, ranks: int) -> Iterator[dict[str, Any]]:
    names = [name.format(half=ranks // 2, ranks=ranks) for name in (*SCHEDULES, *MORE)]
    gbit = link_gbit(kind, ranks, SHAPED_GBIT)
    with Emulated(kind, ranks, gbit) as net:
        for mask, layout, passes in (("full", "contiguous", 1), ("causal", "zigzag", 2)):
            cell = job(names, SHAPED_TOKENS * ranks, passes, mask=mask, layout=layout)
            times = measured(net, cell, 300.0)["seconds"]
            yield {**cell, "ranks": ranks, "kind": kind, "link_gbit": gbit, "found": times}


def job(
    names: list[str], tokens: int, passes: int, kv_heads: int = 8, mask: str = "full", layout: str = "contiguous"
) -> dict[str, Any]:
    """What worker.py is asked to run."""
    return {
        "name": "overheads", "tokens": tokens, "q_heads": 8, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "mask": mask,
        "passes": "+".join(PASSES[:passes]), "layout": layout, "tflops": FAST_TFLOPS, "schedules": names,
        "rounds": ROUNDS, "seconds": 60.0, "all_rounds": True,
    }  # fmt: skip


def cases(cells: Sequence[dict[str, Any]]) -> Iterator[Case]:
    for cell in cells:
        ranks, tokens = cell["ranks"], cell["tokens"]
        size = Workload(1, tokens, tokens, cell["q_heads"], cell["kv_heads"], HEAD_DIM, torch.float32)
        layout, mask = make_layout(cell["layout"], ranks, tokens), parse_mask(cell["mask"])
        shape = Shape(cell["kind"], ranks, cell["link_gbit"]) if "kind" in cell else None
        for name, seconds in cell["found"].items():
            if not seconds:  # it does not fit
                continue
            schedule = named_schedule(name, size, layout, layout, mask, None)
            storage = storage_of(schedule)
            passes = []
            for direction in PASSES[: 2 if "+" in cell["passes"] else 1]:
                agendas = [agenda_of(storage, rank, direction, size, anything) for rank in range(ranks)]
                target = transport_target("gloo")
                programs = [lower_agenda(agenda, size, target) for agenda in agendas]
                passes.append([_counted(schedule, size, program) for program in programs])
            yield Case(name, ranks, shape, passes, statistics.median(seconds))


def _counted(schedule: Any, size: Workload, program: Any) -> list[Any]:
    """Operations; copies and merges as (how many, bytes, how many of them merges), whose costs are to be found."""
    units: list[dict[str, float]] = [{"op_seconds": 1.0}, {"copy_gbs": 1e-9}, {"merge_seconds": 1.0}]
    rates = [Rates("counted", ((1, 1.0),), ((1, 1.0),), **unit) for unit in units]
    counted = [operations.operations(schedule, size, program, each) for each in rates]
    return [
        tuple(x.seconds for x in some) if isinstance(some[0], operations.Compute) and not some[0].kernel else some[0]
        for some in zip(*counted, strict=True)
    ]


def predicted(case: Case, overheads: Overheads) -> float:
    shape = case.shape or Shape("full-mesh", case.ranks, MOST_GBIT)
    net, messages = interconnect_of_shape(shape), overheads.messages(shape)
    total = 0.0
    for programs in case.passes:
        timed = [[_timed(each, overheads) for each in program] for program in programs]
        total += simulate(net, timed, messages, cores=CORES, start_seconds=overheads.start).seconds
    return total


def _timed(each: Any, overheads: Overheads) -> Any:
    if isinstance(each, operations.Compute):  # a kernel that sleeps for nothing: it only costs a call
        return each._replace(seconds=overheads.call, kernel=False)
    if isinstance(each, operations.SimulatedPost | operations.Await):
        return each
    count, nbytes, merges = each
    seconds = count * overheads.operation + nbytes / (overheads.copy_gbs * 1e9) + merges * overheads.merge
    return operations.Compute(seconds, False, 0, "copy")


def error(some: Sequence[Case], overheads: Overheads) -> float:
    return statistics.mean(abs(math.log(predicted(case, overheads) / case.seconds)) for case in some)


def fit(some: Sequence[Case], overheads: Overheads) -> Overheads:
    """One constant after another, up or down as long as it helps."""
    best = error(some, overheads)
    for step in STEPS:
        for name in (field.name for field in fields(Overheads)):
            for factor in (step, 1 / step):
                tried = replace(overheads, **{name: getattr(overheads, name) * factor})
                while (less := error(some, tried)) < best:
                    best, overheads = less, tried
                    tried = replace(overheads, **{name: getattr(overheads, name) * factor})
        print(f"steps of {step}: off by {best:.1%}", flush=True)
    return overheads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="where measurements are kept")
    options = parser.parse_args()
    if options.file is not None and options.file.exists():
        cells = json.loads(options.file.read_text())
    else:
        cells = measure()
        if options.file is not None:
            options.file.write_text(json.dumps(cells))
    every = list(cases(cells))
    found = fit(every[::3], OVERHEADS)
    for kind in ("wide", "shaped"):
        some = [each for each in every if (each.shape is not None) is (kind == "shaped")]
        print(f"{len(some)} calls over {kind} links, on the average off by {error(some, found):.1%}")
    for field, value in zip(fields(Overheads), astuple(found), strict=True):
        print(f"{field.name:14} {value:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
