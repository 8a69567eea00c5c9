"""Measure how long a job waits for its first plan, by its ranks: rank 0 and another are processes, with a link.

    python benchmarks/plan_in_job.py [--ranks 8 16 32 64 256] [--tokens 131072] [--preset hgx-h100] [--runs 1]

Of all other ranks a stand-in answers as they would, at once. Time runs from when both processes have imported all
until both have the plan, the schedule, their own programs of both passes and the links that these need: causal zigzag,
32:8 heads, forward and backward. Trials of kernels and verbs, memory and transports are apart. Then the same in two new
processes, from the plan that the first two kept. Above what a job may have, the forecast of `tokenring plan` is timed,
in one process. `programs`: how much of the seconds a rank's own part took, with both programs and links.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import torch  # noqa: E402

from tokenring.backends.interfaces import AttentionKernel, Transport  # noqa: E402
from tokenring.cli.plan.options import first_ranks, several_hosts  # noqa: E402
from tokenring.ir.schedule_data import PASSES  # noqa: E402
from tokenring.lowering.calls import anything  # noqa: E402
from tokenring.lowering.lower import lower  # noqa: E402
from tokenring.lowering.target import IDEAL, Link  # noqa: E402
from tokenring.planner.choosing.auto import CallToPlan, forecast_call  # noqa: E402
from tokenring.planner.choosing.planner import Planner  # noqa: E402
from tokenring.planner.interconnects.interconnect import Interconnect  # noqa: E402
from tokenring.planner.interconnects.wiring import interconnect_of  # noqa: E402
from tokenring.planner.machines.machine import machine_of_preset  # noqa: E402
from tokenring.planner.machines.presets import preset  # noqa: E402
from tokenring.planner.simulation.predict import Setting  # noqa: E402
from tokenring.runtime.message_groups import connect  # noqa: E402
from tokenring.schedule.size_limits import JOB_RANKS  # noqa: E402
from tokenring.sequence.layout import make_layout  # noqa: E402
from tokenring.sequence.mask import Causal  # noqa: E402
from tokenring.sequence.workload import Request, Workload  # noqa: E402

START = b"start"


@dataclass
class Figures:
    """Figures of one process: seconds of a clock and of the processor, its largest memory, and the schedule.

    programs_seconds: of the clock, what it took to make and lower its own part.
    """

    seconds: float
    programs_seconds: float
    cpu_seconds: float
    memory_mb: float
    name: str


class LinkOfTwo:
    """A transport of two processes, the other ranks' words being empty."""

    def __init__(self, rank: int, world_size: int, link: Connection) -> None:
        self.rank, self.world_size, self._link, self.target = rank, world_size, link, IDEAL

    def exchange_text(self, text: bytes, what: str) -> list[bytes]:
        """Gather the words of both, as `Transport.exchange_text`."""
        return self._with(b"", text)

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Gather the payloads of both, as `Transport.exchange`; the others say what rank 0 does."""
        return self._with(payload, payload)

    def prepare(self, needed: Iterable[Link], device: torch.device) -> None:
        """Connect nobody: time of transports is apart."""

    def _with(self, others: bytes, own: bytes) -> list[bytes]:
        self._link.send_bytes(own)
        words = [own, self._link.recv_bytes()]
        return [*(words if self.rank == 0 else words[::-1]), *[others] * (self.world_size - 2)]


class AnyKernel:
    """A kernel that takes any patch, by its name."""

    name = "stand-in"
    supports_patch = staticmethod(anything)


def net_of(options: argparse.Namespace, ranks: int) -> Interconnect:
    """Return the first ranks of as many of the preset's machines as it takes."""
    of_many, _ = several_hosts(f"preset:{options.preset}", ranks)
    return first_ranks(interconnect_of(preset(of_many)), ranks)


def one_rank(rank: int, ranks: int, options: argparse.Namespace, link: Connection, say: Connection) -> None:
    """Be one rank of the job."""
    torch.set_num_threads(1)
    net, size = net_of(options, ranks), Workload(1, options.tokens, options.tokens, 32, 8, 128, torch.bfloat16)
    net = replace(net, machine=machine_of_preset(options.preset, size.dtype))
    request = Request(size, Causal(), 1.0, True, torch.device("cpu"))
    layout = make_layout("zigzag", ranks, options.tokens)
    planner, transport = Planner(None, ranks, net, (), None), LinkOfTwo(rank, ranks, link)
    link.send_bytes(START)
    link.recv_bytes()
    began, worked = time.perf_counter(), time.process_time()
    kernel = cast(AttentionKernel, AnyKernel())
    found = planner.together(
        cast(Transport, transport), request, (layout, layout),
        lambda: planner.plan(request, (layout, layout), kernel, transport.target),
    )  # fmt: skip
    planned = time.perf_counter()
    for direction in PASSES:
        lower(found.schedule, rank, direction, size)
        connect(cast(Transport, transport), found.schedule, direction, torch.device("cpu"))
    programs_seconds = time.perf_counter() - planned
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    say.send(Figures(seconds, programs_seconds, worked, memory, found.name))


def job(ranks: int, options: argparse.Namespace) -> list[Figures]:
    """Return what rank 0 and rank 1 of a job took."""
    fresh = multiprocessing.get_context("spawn")
    link, said = fresh.Pipe(), [fresh.Pipe(duplex=False) for _ in range(2)]
    both = [
        fresh.Process(target=one_rank, args=(rank, ranks, options, link[rank], said[rank][1])) for rank in range(2)
    ]
    for each in both:
        each.start()
    for _, end in said:
        end.close()
    found = [cast(Figures, heard.recv()) for heard, _ in said]
    for each in both:
        each.join()
    return found


def forecast_alone(ranks: int, options: argparse.Namespace, say: Connection) -> None:
    """Forecast for more ranks than a job may plan for."""
    torch.set_num_threads(1)
    size = Workload(1, options.tokens, options.tokens, 32, 8, 128, torch.bfloat16)
    layout = make_layout("zigzag", ranks, options.tokens)
    setting = Setting(size, net_of(options, ranks), machine_of_preset(options.preset, size.dtype), PASSES)
    began, worked = time.perf_counter(), time.process_time()
    found = forecast_call(CallToPlan(setting, layout, layout, Causal()))
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    say.send(Figures(seconds, 0.0, worked, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, found.name))


def alone(ranks: int, options: argparse.Namespace) -> Figures:
    """Return what a forecast took."""
    fresh = multiprocessing.get_context("spawn")
    heard, end = fresh.Pipe(duplex=False)
    process = fresh.Process(target=forecast_alone, args=(ranks, options, end))
    process.start()
    end.close()
    found = heard.recv()
    process.join()
    return cast(Figures, found)


def line(ranks: int, what: str, found: list[Figures]) -> str:
    """Return a row: the slowest process's clock, each one's seconds of the processor, the most memory."""
    worked = " + ".join(f"{each.cpu_seconds:.2f}" for each in found)
    slowest, memory = max(each.seconds for each in found), max(each.memory_mb for each in found)
    own = max(each.programs_seconds for each in found)
    return f"{ranks:6} {what:9} {slowest:8.3f} {own:9.3f} {worked:>14} {memory:7.0f}  {found[0].name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 256, 1024, 4096])
    parser.add_argument("--tokens", type=int, default=131072, help="of the whole sequence")
    parser.add_argument("--preset", default="hgx-h100")
    parser.add_argument("--runs", type=int, default=1)
    options: Any = parser.parse_args()
    print(f"{'ranks':>6} {'what':9} {'seconds':>8} {'programs':>9} {'processor, s':>14} {'MB':>7}  schedule")
    for ranks in options.ranks:
        for _ in range(options.runs):
            if ranks > JOB_RANKS:
                print(line(ranks, "forecast", [alone(ranks, options)]), flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder:
                os.environ["TOKENRING_PLAN_CACHE"] = folder
                print(line(ranks, "first", job(ranks, options)), flush=True)
                print(line(ranks, "kept", job(ranks, options)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
