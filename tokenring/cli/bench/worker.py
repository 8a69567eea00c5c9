"""One rank of a benchmark: python -m tokenring.cli.bench.worker CASE, as torchrun starts it for the command.

Its standard output carries lines for the process that shows them, its standard error a log.
"""

from __future__ import annotations

import json
import socket
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tokenring.cli.bench.candidates import WAIT_SECONDS, RaceSetting, one_process, our_candidates
from tokenring.cli.bench.peers import peer_candidates, sleeping_instead
from tokenring.cli.bench.race import race
from tokenring.cli.bench.results import RaceCase, RaceMachine, RaceReport
from tokenring.display.console import cores, processor
from tokenring.launch.command import Tell, process_group, quiet, serve


def main(argv: list[str]) -> int:
    """Run this rank; return the exit code."""
    return serve(partial(run, RaceCase.of(json.loads(argv[0]))))


def run(case: RaceCase, tell: Tell) -> RaceReport | None:
    """Run the benchmark on the processes that torchrun has started; return the report at rank 0, None elsewhere."""
    torch.set_num_threads(1)
    with process_group(WAIT_SECONDS):
        setting = RaceSetting(case, dist.get_rank(), dist.get_world_size())
        machine = machine_of(setting.ranks)
        candidates = our_candidates(case)
        if case.compute_tflops is None:  # else one process, which moves nothing, is nothing to compare with
            candidates.append(one_process())
        candidates += peer_candidates(case.peers)
        with sleeping_instead(case.compute_tflops):
            entries, reference, notes = race(setting, candidates, tell if setting.rank == 0 else quiet)
        del candidates
    return RaceReport(case, machine, entries, reference, notes) if setting.rank == 0 else None


def machine_of(ranks: int) -> RaceMachine:
    """Return the machines on which the ranks of this group run; all of them call it."""
    hosts: list[Any] = [None] * ranks
    dist.all_gather_object(hosts, socket.gethostname())
    return RaceMachine(processor(), cores(), len(set(hosts)), ranks, torch.__version__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
