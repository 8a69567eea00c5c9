"""One rank of a measurement: python -m tokenring.topology.measure.worker CASE, as torchrun starts it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenring.ranks import Report, Tell, process_group, serve

if TYPE_CHECKING:
    from tokenring.topology.facts import Facts


@dataclass(frozen=True)
class Case:
    """What is asked of the ranks."""

    seconds: float
    transport: str


def main(argv: list[str]) -> int:
    """Run this rank; returns the exit code."""
    case = Case(**json.loads(argv[0]))

    def measured(tell: Tell) -> Report | None:
        from tokenring.topology.measure.command import Measured

        facts = run(case, tell)
        return None if facts is None else Measured([facts])

    return serve(measured)


def run(case: Case, tell: Tell) -> Facts | None:
    """The measurement, on the processes that torchrun has started; the facts are at rank 0."""
    import torch
    import torch.distributed as dist

    from tokenring.backends.registry import make_transport
    from tokenring.topology.measure.run import WAIT_SECONDS, measure

    torch.set_num_threads(1)
    with process_group(WAIT_SECONDS):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        transport = make_transport(case.transport, group, WAIT_SECONDS) if group is not None and ranks > 1 else None
        try:
            found = measure(transport, case.seconds, tell if rank == 0 else lambda done, steps, what: None)
        finally:
            if transport is not None:
                transport.close()
        del transport, group
    return found if rank == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
