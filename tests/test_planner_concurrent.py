"""Groups of tensor parallelism that exchange at the same time: a job reckons with them as the command does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
import torch

import tokenring as tr
from tokenring.cli import main
from tokenring.errors import ConfigurationError
from tokenring.layout import make_layout
from tokenring.planner.auto import Call, plan_call
from tokenring.planner.interconnect import Interconnect, full_mesh
from tokenring.planner.plan import Candidate
from tokenring.planner.planner import Planner
from tokenring.planner.predict import Setting
from tokenring.planner.presets import preset
from tokenring.planner.wiring import interconnect_of
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


def figures(each: Candidate) -> dict[str, object]:
    return {"name": each.name, "seconds": each.predicted_seconds, "bound": each.bound_seconds}


def looked(given: Topology | Interconnect, tensor_parallel: int = TENSOR) -> Interconnect:
    return Planner(None, HOSTS, given, (), None, tensor_parallel).look(CUDA, torch.float16)[0]


def in_a_job(given: Topology, tensor_parallel: int = TENSOR) -> list[dict[str, object]]:
    """Each rank has two of the heads."""
    net, machine = Planner(None, HOSTS, given, (), None, tensor_parallel).look(CUDA, torch.float16)
    size, layout = tr.Workload(1, LENGTH, LENGTH, 2, 2, DIM, torch.float16), make_layout("zigzag", HOSTS, LENGTH)
    asked = Setting(size, net, machine, ("forward",))
    return [figures(each) for each in plan_call(Call(asked, layout, layout, tr.Causal(), SCHEDULES)).candidates]


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
    from tokenring.planner import planner

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
