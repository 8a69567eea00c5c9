"""HCCL in the planner: the memory of its communicators, and the queues of its three ways to divide messages."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from nets import BOTH, clusters, named, setting, workload

import tokenring as tr
from tokenring import ConfigurationError
from tokenring.backends.transports.hccl import CONNECTION_BYTES
from tokenring.cli.main import main
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.footprint import connections
from tokenring.lowering.target import links
from tokenring.planner.choosing.folding import Folding
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.choosing.scale_out import Task, figures
from tokenring.planner.choosing.symmetry import symmetry_of
from tokenring.planner.interconnects.interconnect import full_mesh
from tokenring.planner.simulation.predict import Setting, predict
from tokenring.schedule.families.registry import parse
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import contiguous

pytestmark = pytest.mark.usefixtures("plans_kept")

A2 = ("--topology", "preset:atlas-800t-a2", "--seq", "16k", "--heads", "8", "--mask", "full")
TRANSPORTS = {"hccl": 1, "hccl/channel": 2, "hccl/pair": 4}  # how many times fewer communicators at most


def over(asked: Setting, transport: str) -> Setting:
    target = transport_target(transport)
    return Setting(asked.workload, asked.interconnect, asked.machine.over(target), asked.passes, target=target)


def most_connections(schedule: Schedule, transport: str) -> int:
    """Of the rank that has most, in both passes together."""
    used, target = links(schedule, BOTH), transport_target(transport)
    return max(connections(used, target, rank) for rank in range(schedule.world_size))


def printed(*options: str) -> str:
    out, err = StringIO(), StringIO()
    code = main(["plan", *options], out, err)
    assert (code, err.getvalue()) == (0, "")
    return out.getvalue()


# ---------- memory


COUNTS = {"ring": (4, 4, 2), "direct-q": (28, 14, 7), "tokenring": (0, 0, 7)}


@pytest.mark.parametrize(("name", "counts"), COUNTS.items())
def test_peak_bytes_have_the_communicators_in_them(name: str, counts: tuple[int, ...]) -> None:
    """Eight ranks: by hand for a ring (KV on, dKV on) and for one hop to all (q, dq both ways, o, dkv both ways)."""
    size = workload(8, (8, 8), 64)
    schedule, asked = named(name, 8, size.q_length), setting(full_mesh(8, 1.0), size, BOTH)
    bare = predict(schedule, asked)
    assert (bare.connection_bytes, bare.peak_bytes) == (0, max(schedule.peak_bytes(size, each) for each in PASSES))
    for transport, count in zip(TRANSPORTS, counts, strict=True):
        found = predict(schedule, over(asked, transport))
        assert count in (0, found.connections)
        assert found.connections == most_connections(schedule, transport)
        assert found.connection_bytes == found.connections * CONNECTION_BYTES
        assert found.connection_bytes < found.peak_bytes <= bare.peak_bytes * 2 + found.connection_bytes


def test_peak_bytes_of_a_schedule() -> None:
    size = workload(4, (4, 4), 64)
    schedule = named("direct-kv", 4, size.q_length)
    more = schedule.peak_bytes(size, "forward", "hccl") - schedule.peak_bytes(size, "forward")
    assert more == 3 * 2 * CONNECTION_BYTES  # KV to and from three peers


def test_the_command_shows_them() -> None:
    text = printed(*A2)
    best = json.loads(printed(*A2, "--json"))["candidates"][0]
    assert best["connection_bytes"] == best["connections"] * CONNECTION_BYTES < best["peak_bytes"]
    said = f"of the memory of {best['name']}, "
    line = next(line for line in text.splitlines() if line.startswith(said))
    assert line.endswith(f" are those of {best['connections']} communicators of two ranks")
    assert "of the memory of ring, 168 MB are those of 4 comm" in printed(*A2, "--explain", "ring")
    assert "communicators" not in printed("--topology", "preset:a10-pix-4", *A2[2:])
    fewer = printed(*A2, "--schedules", best["name"], "--transport", "hccl/pair", "--json")
    assert json.loads(fewer)["candidates"][0]["connections"] < best["connections"]


def test_other_transports_are_refused_by_name() -> None:
    out, err = StringIO(), StringIO()
    assert main(["plan", *A2, "--transport", "nccl"], out, err) == 2
    assert "'nccl'" in err.getvalue() and "hccl/pair" in err.getvalue()


def test_a_limit_excludes_many_peers_and_names_a_way_out() -> None:
    """What does not fit in four queues a pair may fit in one."""
    limited = (*A2, "--memory-limit", "500M", "--schedules", "direct-q", "--all")
    out, err = StringIO(), StringIO()
    assert main(["plan", *limited, "--transport", "hccl"], out, err) == 2
    assert "for 28 communicators" in err.getvalue() and "a transport with fewer communicators" in err.getvalue()
    assert "direct-q" in printed(*limited, "--transport", "hccl/pair")


def test_plans_written_before_are_read() -> None:
    text = printed(*A2, "--schedules", "ring", "--json")
    document: dict[str, Any] = json.loads(text)
    for each in document["candidates"]:
        del each["connections"], each["connection_bytes"]
    assert Plan.from_json(json.dumps(document)).candidates[0].connections is None
    assert Plan.from_json(text).candidates[0].connections == 4


@pytest.mark.parametrize("name", ["ring", "direct-kv", "usp/4", "double-ring/4"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_folded_worlds_count_the_same(name: str, transport: str) -> None:
    """One host stands for all: its ranks have as many communicators as in the whole."""
    net, size, target = clusters(8), workload(32, (32, 32), 8), transport_target(transport)
    layout = contiguous(32, size.q_length)
    whole = most_connections(make_schedule(name, layout, layout, tr.Full()), transport)
    scheme = parse(name).make(32)
    one = Folding(scheme, size.q_length, size.kv_length, symmetry_of(scheme, 32, 4)).schedule()
    assert max(connections(links(one, BOTH), target, rank) for rank in range(4)) == whole
    found = figures(name, Task(over(setting(net, size, BOTH, tflops=1.0), transport)), 2, float("inf"))
    assert found is not None and round(found.connections) == whole
    assert round(found.connection_bytes) == whole * CONNECTION_BYTES < found.peak_bytes


# ---------- queues


def test_one_queue_for_both_directions_halves_direct_schedules() -> None:
    """Trap 9, and why messages are divided by direction too."""
    size = workload(8, (8, 8), 256)
    schedule, asked = named("direct-kv", 8, size.q_length), setting(full_mesh(8, 1.0), size)
    apart, together, one = (predict(schedule, over(asked, each)).seconds for each in TRANSPORTS)
    assert together == pytest.approx(2 * apart, rel=0.01)
    assert one >= together


def test_one_queue_for_both_channels_is_slower_where_they_meet() -> None:
    size = workload(4, (4, 4), 256)
    schedule, asked = named("tokenring", 4, size.q_length), setting(full_mesh(4, 1.0), size, BOTH)
    apart, together, one = (predict(schedule, over(asked, each)).seconds for each in TRANSPORTS)
    assert apart < together < one


def test_other_capabilities_than_the_three_have_no_meaning() -> None:
    with pytest.raises(ConfigurationError, match="unknown transport 'hccl/none'"):
        transport_target("hccl/none")
