"""Groups of tensor parallelism that exchange at the same time: a job reckons with them as the command does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
import torch

import tokenring as tr
from tokenring.cli.main import main
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing import planner
from tokenring.planner.choosing.auto import CallToPlan, plan_call
from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.choosing.planner import Planner
from tokenring.planner.interconnects.interconnect import Interconnect, full_mesh
from tokenring.planner.interconnects.shared_links import group_net
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.machines.presets import PRESETS, preset
from tokenring.planner.machines.server_spec import cluster_facts
from tokenring.planner.simulation.predict import Setting
from tokenring.sequence.layout import make_layout
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.ranks import Topology

HOSTS, TENSOR, LENGTH, DIM = 4, 8, 8192, 64
NAME = f"dgx-1-v100*{HOSTS}"  # four NICs for eight devices: two groups share each
SCHEDULES = ("ring", "direct-kv")
CUDA = torch.device("cuda")


def by_the_command() -> list[dict[str, object]]:
    out, err = StringIO(), StringIO()
    sizes = ("--seq", str(LENGTH), "--heads", str(TENSOR * 2), "--dim", str(DIM), "--dtype", "fp16")
    where = ("--topology", f"preset:{NAME}", "--tp", str(TENSOR), "--pass", "forward")
    assert main(["plan", *sizes, *where, "--schedules", ",".join(SCHEDULES), "--json"], out, err) == 0, err.getvalue()
    return [figures(Candidate(**each)) for each in json.loads(out.getvalue())["candidates"]]


def widths(net: Interconnect, src: int, dst: int) -> list[float]:
    return [net.gbs(wire) for wire in net.way(src, dst)]


def figures(each: Candidate) -> dict[str, object]:
    return {"name": each.name, "seconds": each.predicted_seconds, "bound": each.bound_seconds}


def looked(given: Topology | Interconnect, tensor_parallel: int = TENSOR) -> Interconnect:
    return Planner(None, HOSTS, given, (), None, tensor_parallel).look(CUDA, torch.float16)[0]


def in_a_job(given: Topology, tensor_parallel: int = TENSOR) -> list[dict[str, object]]:
    """Each rank has two of the heads."""
    net, machine = Planner(None, HOSTS, given, (), None, tensor_parallel).look(CUDA, torch.float16)
    size, layout = tr.Workload(1, LENGTH, LENGTH, 2, 2, DIM, torch.float16), make_layout("zigzag", HOSTS, LENGTH)
    asked = Setting(size, net, machine, ("forward",))
    return [figures(each) for each in plan_call(CallToPlan(asked, layout, layout, tr.Causal(), SCHEDULES)).candidates]


def own(first: int, order: Sequence[int] = range(HOSTS)) -> Topology:
    """What a probe of one group sees: its ranks' devices, in a graph of the whole machines."""
    whole = preset(NAME)
    assert whole.graph is not None
    devices = whole.devices[first::TENSOR]
    return replace(Topology.of(whole.graph, [devices[each] for each in order]), reached=whole.reached)


@pytest.mark.parametrize("given", [preset(NAME), own(0), own(3)], ids=["of all ranks", "first group", "fourth group"])
def test_a_job_and_the_command_agree(given: Topology) -> None:
    assert in_a_job(given) == [pytest.approx(each) for each in by_the_command()]


def test_alone_it_would_be_faster() -> None:
    """What agrees above is no accident: a NIC of its own changes the figures."""
    alone, beside = (in_a_job(own(0), groups)[0]["seconds"] for groups in (1, TENSOR))
    assert isinstance(alone, float) and isinstance(beside, float) and alone < 0.8 * beside


def test_ranks_in_another_order() -> None:
    """A job may number its hosts otherwise than the graph does."""
    net, other = looked(own(1)), looked(own(1, (2, 0, 3, 1)))
    assert other.places == tuple(net.places[each] for each in (2, 0, 3, 1))
    assert other.way(1, 3) == net.way(0, 1) and other.gbs(other.way(1, 3)[-1]) == net.gbs(net.way(0, 1)[-1])


# ---------- data parallelism on the same hosts


def group_of_rank(rank: int, tensor: int, context: int, ranks: int) -> list[int]:
    """Its context-parallel group, as Megatron's rank generator makes it with the default order."""
    ends = tensor * context
    return [each for each in range(ranks) if each // ends == rank // ends and each % tensor == rank % tensor]


def seen_by(name: str, ranks: list[int]) -> Topology:
    """What a probe of these ranks sees: the whole of their machines, and no others."""
    whole = preset(name)
    assert whole.graph is not None
    if not whole.hosts[0]:
        return replace(Topology.of(whole.graph, [whole.devices[rank] for rank in ranks]), reached=whole.reached)
    hosts = {None, *(whole.hosts[rank] for rank in ranks)}
    known = {each.id for each in whole.graph.devices if each.host in hosts}
    graph = Graph(
        tuple(each for each in whole.graph.devices if each.id in known),
        tuple(each for each in whole.graph.edges if each.a in known and each.b in known),
        seen=whole.graph.seen,
    )
    return replace(Topology.of(graph, [whole.devices[rank] for rank in ranks]), reached=whole.reached)


def left_for(name: str, mine: list[int], tensor: int, context: int) -> dict[tuple[int, int], list[object]]:
    """Of each pair of ranks the widths of its wires, over how many of all groups pass them; counted way by way."""
    net = interconnect_of(preset(name))
    users = Counter[str]()
    for group in {tuple(group_of_rank(rank, tensor, context, net.world_size)) for rank in range(net.world_size)}:
        users.update({wire for a in group for b in group for wire in net.way(a, b)})
    return {
        (a, b): [pytest.approx(net.gbs(wire) / users[wire]) for wire in net.way(mine[a], mine[b])]
        for a in range(context) for b in range(context) if a != b
    }  # fmt: skip


BESIDE = [  # accelerators, tp, cp
    pytest.param("l40s-pcie-8", 2, 2, id="four groups in a tree of PCIe"),
    pytest.param("a10-pix-4", 2, 1, id="nothing to exchange"),
    pytest.param("hgx-h100", 2, 2, id="a port each"),
    pytest.param("dgx-1-v100", 4, 1, id="alone"),
    pytest.param("atlas-800t-a2", 2, 2, id="a link each"),
    pytest.param("a10-pix-4*3", 2, 3, id="across hosts, which three groups of ranks divide unevenly"),
    pytest.param("l40s-pcie-8*3", 2, 6, id="the same, in a tree"),
    pytest.param("l40s-pcie-8*3", 2, 3, id="some groups of which keep to a host, and out of its NICs"),
    pytest.param("l40s-pcie-8*3", 4, 3, id="and with more tensor parallelism"),
]


@pytest.mark.parametrize(("name", "tensor", "context"), BESIDE)
def test_groups_of_data_parallelism_are_counted(name: str, tensor: int, context: int) -> None:
    """Each group of a job that has all accelerators: what it is left with is what all groups' ways leave of wires."""
    ranks = preset(name).world_size
    for first in range(ranks):
        mine = group_of_rank(first, tensor, context, ranks)
        if mine[0] != first or len(mine) < context:
            continue
        net = group_net(seen_by(name, mine), context, tensor, ranks)
        assert (net.world_size, "one group's alone" in " ".join(net.notes)) == (context, False)
        found = {(a, b): widths(net, a, b) for a in range(context) for b in range(context) if a != b}
        assert found == left_for(name, mine, tensor, context)


NIC = 12.5 * 0.97  # GB/s, of a host of four
BRIDGE = 31 * 0.85
TAKEN = "all accelerators are taken to be one job's, in groups of tensor_parallel=2"
ALONE = "wires are taken to be one group's alone: of tensor_parallel=2 only its own ranks are known"


@pytest.mark.parametrize(
    ("job_ranks", "nics", "bridge", "says"),
    [
        (12, (NIC / 2, NIC / 4), BRIDGE / 2, TAKEN),  # groups of 0, 2, 4; 1, 3, 5; 6, 8, 10; 7, 9, 11
        (None, (NIC / 2, NIC / 4), BRIDGE / 2, TAKEN),
        (6, (NIC / 2, NIC / 2), BRIDGE / 2, ""),  # the others are idle
        (7, (NIC, NIC), BRIDGE, ALONE),  # which of them are in the job nobody knows
    ],
)
def test_wires_that_are_shared(
    job_ranks: int | None, nics: tuple[float, float], bridge: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: hosts of four with one NIC, the second of them with the first group's last rank."""
    monkeypatch.setattr(planner, "_job_ranks", lambda: job_ranks)
    given = seen_by("a10-pix-4*3", [0, 2, 4])
    net = Planner(None, 3, given, (), None, 2).look(CUDA, torch.float16)[0]
    out, into = ([wire for wire in net.way(0, 2) if wire.endswith(end)] for end in ("0:NIC0>", "1:>NIC0"))
    assert [net.gbs(wire) for wire in (*out, *into)] == pytest.approx(nics)
    assert widths(net, 0, 1) == pytest.approx([BRIDGE, bridge, bridge, BRIDGE])  # its own slot, an uplink of two
    assert [note for note in (TAKEN, ALONE) if note in net.notes] == ([says] if says else [])


@pytest.mark.parametrize("first", [0, 1, 4, 5])
def test_ports_that_are_not_shared(first: int) -> None:
    """A switch with a port each: four groups of two are as one."""
    given = seen_by("hgx-h100", [first, first + 2])
    beside, alone = (group_net(given, 2, groups) for groups in (2, 1))
    assert widths(beside, 0, 1) == widths(alone, 0, 1) == pytest.approx([450 * 0.84] * 2)


@pytest.mark.parametrize("ranks", [[1, 3, 5], [0, 3], [2, 4], [0, 4]], ids=str)
def test_groups_that_lie_otherwise_are_taken_alone(ranks: list[int]) -> None:
    """A step that is not tensor_parallel, or what would end outside of the machine."""
    net = group_net(seen_by("l40s-pcie-8", [*ranks]), len(ranks), 2)
    assert (ALONE in net.notes) == (ranks not in ([1, 3, 5], [2, 4]))


def test_hosts_that_tensor_parallelism_does_not_divide() -> None:
    """Where ranks of the job begin on such a host cannot be told."""
    graph = merge(cluster_facts(replace(PRESETS["a10-pix-4"].server, count=3), 2))
    for tensor, says in ((2, True), (3, False)):
        given = Topology.of(graph, [f"node{place // 3}:GPU{place % 3}" for place in range(0, 6, tensor)])
        assert any("alone" in note for note in group_net(given, 6 // tensor, tensor).notes) == says


@pytest.mark.parametrize(
    "given",
    [Topology("pairs", HOSTS, hosts=("a", "b", "c", "d")), full_mesh(HOSTS, 1.0), preset("a10-pix-4")],
    ids=["no graph", "an interconnect", "too few accelerators"],
)
def test_what_is_not_known_is_said(given: Topology | Interconnect) -> None:
    net = looked(given)
    plain = given if isinstance(given, Interconnect) else interconnect_of(given)
    assert net.fabrics == plain.fabrics
    assert f"of tensor_parallel={TENSOR} only its own ranks are known" in " ".join(net.notes)
    assert "tensor_parallel" not in " ".join(looked(given, 1).notes)


def test_ranks_of_one_machine_share_its_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "cores", lambda: 4)
    (alone, free), (beside, shared) = (
        Planner(None, 4, None, (), None, groups).look(torch.device("cpu"), torch.float32) for groups in (1, 2)
    )
    assert beside.pair_gbs(0, 1) == alone.pair_gbs(0, 1) / 2
    assert free.shared_cores == float("inf") and shared.shared_cores == 2
    assert "8 ranks share 4 cores" in beside.notes


@pytest.mark.parametrize("given", [0, -1, 1.5, "2", None])
def test_refuses_what_is_no_number_of_groups(given: object) -> None:
    with pytest.raises(ConfigurationError, match=r"tensor_parallel=.*: give how many ranks share the heads"):
        tr.ContextParallel(tensor_parallel=given)  # type: ignore[arg-type]
    assert tr.ContextParallel(tensor_parallel=2).tensor_parallel == 2


def test_refuses_a_topology_of_other_ranks() -> None:
    with pytest.raises(ConfigurationError, match=r"has 4 ranks, the group has 1: .* or of all 8 that tensor_par"):
        tr.ContextParallel(tensor_parallel=8, topology=full_mesh(4, 1.0))
    for fitting in (1, 8):
        assert tr.ContextParallel(tensor_parallel=8, topology=full_mesh(fitting, 1.0)).topology is not None


def test_refuses_groups_that_do_not_fit_the_hosts() -> None:
    with pytest.raises(ConfigurationError, match="tensor parallelism of 8 does not fit hosts of 4"):
        looked(preset("a10-pix-4*8"))
