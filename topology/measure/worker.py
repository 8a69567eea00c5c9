"""One rank of a measurement: python -m tokenring.topology.measure.worker CASE, as torchrun starts it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial

from tokenring.launch.command import Tell, process_group, quiet, serve
from tokenring.topology.model.facts import Facts
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.model.schema import from_json, to_json
from tokenring.topology.model.verdict import Verdict, classify


@dataclass(frozen=True)
class MeasureCase:
    """The parameters of a measurement: about how many seconds it takes, and over which transport."""

    seconds: float
    transport: str


@dataclass
class LinksMeasured:
    """The report that rank 0 returns."""

    facts: list[Facts]

    def to_json(self) -> str:
        """Return the facts as a JSON document; see schema.to_json."""
        return to_json(self.facts)

    @staticmethod
    def from_json(text: str) -> LinksMeasured:
        """Read the report from its JSON document. Raises TopologyError."""
        return LinksMeasured(from_json(text))

    def seen(self) -> tuple[Graph, Verdict]:
        """Return the graph of the facts, and the verdict on it."""
        graph = merge(self.facts)
        return graph, classify(graph)


def main(argv: list[str]) -> int:
    """Run this rank; return the exit code."""
    return serve(partial(run, MeasureCase(**json.loads(argv[0]))))


def run(case: MeasureCase, tell: Tell) -> LinksMeasured | None:
    """Measure on the processes that torchrun has started; return the report on rank 0, None on others."""
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
            found = measure(transport, case.seconds, tell if rank == 0 else quiet)
        finally:
            if transport is not None:
                transport.close()
        del transport, group
    return LinksMeasured([found]) if rank == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
