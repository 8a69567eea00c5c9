"""One rank of the test bed's: prints, as JSON, the topology that it was given. Run by test_topology_job.py."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import torch.distributed as dist

from tokenring.backends.control.process_info import this_process
from tokenring.topology.probing.device_identity import Seat
from tokenring.topology.probing.job import gather
from tokenring.topology.ranks import Topology, seated
from tokenring.topology.sources import read

DUMP = Path(__file__).resolve().parents[1] / "data" / "topology" / "nccl-switch.xml"


def told(topology: Topology) -> dict[str, object]:
    assert topology.verdict is not None
    found = {"hosts": topology.hosts, "devices": topology.devices, "digest": topology.digest}
    return {**found, "class": topology.verdict.name}


def main() -> None:
    dist.init_process_group("gloo")
    facts = read(DUMP.read_text(), DUMP.name)
    bus_id = facts.accelerators[3 - dist.get_rank() % 2].bus_id  # the last device first
    seat = Seat(socket.gethostname(), this_process().boot_id, "cuda", bus_id)
    group = dist.group.WORLD
    assert group is not None
    real = Topology.probe(cache=False, timeout_seconds=30)
    faked = gather(group, seat, lambda: [facts], 30.0, seated)
    print(json.dumps({"real": told(real), "faked": told(faked)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
