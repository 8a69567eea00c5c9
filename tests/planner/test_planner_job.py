"""`schedule="auto"` in a job: what ranks agree on, what is refused on all of them, plans that are given."""

from __future__ import annotations

import logging
import os
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from nets import call, named, setting
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.auto import plan_call
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.choosing.planner import Planner
from tokenring.planner.interconnects.interconnect import Interconnect, LinkFabric, full_mesh, of_one_host, ring_fabric
from tokenring.sequence.layout import make_layout
from tokenring.sequence.workload import Request
from tokenring.tables.rates import constant
from tokenring.topology.ranks import Topology
from tokenring.topology.ranks import full_mesh as joined

RANKS, LENGTH, HEADS, DIM = 4, 256, 4, 64


def tensors(length: int = LENGTH) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(1, length, HEADS, DIM) for _ in range(4)]


def exact(cp: tr.ContextParallel, length: int = LENGTH, mask: tr.Mask | None = None) -> bool:
    """Whether forward and backward are what float64 gives."""
    mask = tr.Causal() if mask is None else mask
    q, k, v, dout = tensors(length)
    want = attention64(q, k, v, dout, allowed(mask, length, length))
    parts = [tr.shard(each, cp).requires_grad_() for each in (q, k, v)]
    out = tr.attention(parts[0], parts[1], parts[2], cp, mask=mask)
    torch.autograd.backward(out, tr.shard(dout, cp))
    got = [tr.unshard(out.detach(), cp), *(tr.unshard(each.grad, cp) for each in parts if each.grad is not None)]
    return max(relative_error(a, b) for a, b in zip(got, (want[0], *want[2:]), strict=True)) < 5e-6


def shuffled() -> Interconnect:
    """A ring whose neighbours are 0, 2, 1, 3: its good order is another one than a mesh's."""
    place = [0, 2, 1, 3]
    whole = ring_fabric(RANKS, 1.0)
    ways = {(a, b): whole.ways[place[a], place[b]] for a in range(RANKS) for b in range(RANKS) if a != b}
    return of_one_host("shuffled ring", LinkFabric(RANKS, ways, whole.gbs))


def auto(here: Here, text: str, differ: bool) -> tuple[bool, str, str]:
    """Exact; the name and a digest of what all take. Where ranks differ, one was given another interconnect."""
    net = shuffled() if here.rank == 0 or not differ else full_mesh(RANKS, 100.0)
    cp = here.cp(schedule=text, topology=net)
    fine = exact(cp)
    q = tr.shard(tensors()[0], cp).requires_grad_()
    made = tr.plan(q, q, q, cp, tr.Causal())
    return fine, made.name, made.schedule.to_json()


@pytest.mark.parametrize("text", ["auto", "auto:ring", "auto:tokenring,usp/2"])
def test_all_take_rank_0s_word(text: str, ranks: RankPools) -> None:
    """Also its order of the ranks, which rank 1 would not choose by what it knows."""
    together, apart = (ranks(RANKS)(auto, text, differ) for differ in (False, True))
    assert all(fine for fine, _, _ in together + apart)
    assert len({(name, schedule) for _, name, schedule in together + apart}) == 1


def on_accelerators(here: Here, who_knows: tuple[int, ...]) -> tuple[str, int]:
    """What is planned among accelerators of which some ranks were told the topology, and how often this rank probed."""
    probed = []

    def probe(group: object, device: torch.device, **limits: float) -> Topology:
        probed.append(device)
        dist.barrier()  # as a probe is one thing of all ranks
        return joined(RANKS, 100.0)

    planner = Planner(here.base.group, RANKS, joined(RANKS, 50.0) if here.rank in who_knows else None, (), None)
    size = tr.Workload(1, LENGTH, LENGTH, HEADS, HEADS, DIM)
    request, layout = Request(size, tr.Causal(), 1.0, False, torch.device("cuda")), make_layout("zigzag", RANKS, LENGTH)
    names = []
    assert here.base.transport is not None
    with patch.object(Topology, "probe", probe):
        for name in ("ring", "direct-kv"):  # the second call finds what the first one saw
            made = partial(Plan, named(name, RANKS, LENGTH, tr.Causal(), "zigzag"), size, "by hand")
            names.append(planner.together(here.base.transport, request, (layout, layout), made).name)
    return " ".join(names), len(probed)


@pytest.mark.parametrize(("who_knows", "probes"), [((), 1), ((0,), 0), ((0, 1, 2, 3), 0), ((1, 2, 3), 1), ((2,), 1)])
def test_ranks_probe_together_or_not_at_all(who_knows: tuple[int, ...], probes: int, ranks: RankPools) -> None:
    """Rank 0 plans: if it was told what joins the ranks, nobody has to look, and else everybody does."""
    assert ranks(RANKS)(on_accelerators, who_knows) == [("ring direct-kv", probes)] * RANKS


def refused(here: Here, limit: int) -> str:
    try:
        exact(here.cp(schedule="auto", memory_limit_bytes=limit))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_limit_that_nothing_meets_is_refused_everywhere(ranks: RankPools) -> None:
    """With one message; and the ranks go on."""
    said = ranks(RANKS)(refused, 64)
    assert {text.split(";")[0] for text in said} == {"no schedule fits in 64 B a rank"}
    assert len(set(said)) == 1
    assert all(text == "" for text in ranks(RANKS)(refused, 1 << 30))


def logged(here: Here) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tokenring")
    before, level = log.level, logging.INFO
    log.addHandler(handler)
    log.setLevel(level)
    try:
        cp = here.cp(schedule="auto")
        exact(cp)
        exact(cp)  # cached: nothing is said again
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return lines


def test_one_line_says_what_and_why(ranks: RankPools) -> None:
    first, *others = ranks(RANKS)(logged)
    first = [each for each in first if not each.startswith("rank 0 plans: ")]  # said on a busy machine
    assert len(first) == 1
    assert first[0].startswith("schedule auto: ")
    for part in (" predicted for forward + backward on ", " × the lower bound, bound by "):
        assert part in first[0]
    assert "; next " in first[0] or "; all others take more than " in first[0]
    assert "8 GB/s in all are assumed" in first[0]
    for figures in ("; one core of an AMD EPYC", " (taken for any CPU); messages: 30 µs a message, of Gloo on"):
        assert figures in first[0], "what was taken for this CPU"
    assert "\n" not in first[0]
    assert others == [[], [], []]


def planned_passes(here: Here) -> list[str]:
    """Why, of an evaluation and of the first forward of a reentrant checkpoint: gradients are off in both."""
    cp = here.cp(schedule="auto")
    q = tr.shard(tensors()[0], cp)
    found = []
    with torch.no_grad():
        for x in (q, q.clone().requires_grad_(), q):
            tr.attention(x, x, x, cp, mask=tr.Causal())
            found.append(tr.plan(x, x, x, cp, tr.Causal()).reason.partition(" predicted for ")[2].partition(" on ")[0])
    return found


def test_a_checkpoint_does_not_take_the_plan_of_an_evaluation(ranks: RankPools) -> None:
    """It is for one pass, and the second forward of the checkpoint is planned for both."""
    assert ranks(RANKS)(planned_passes) == [["forward", "forward + backward", "forward"]] * RANKS


def wants_at(here: Here, odd: int, schedule: str) -> str:
    cp = here.cp(schedule=schedule)
    q = tr.shard(tensors()[0], cp).requires_grad_(here.rank == odd)
    try:
        with torch.no_grad():
            tr.attention(q, q, q, cp, mask=tr.Causal())
    except ConfigurationError as error:
        return str(error)
    return ""


def test_ranks_that_would_plan_for_other_passes_are_refused(ranks: RankPools) -> None:
    """Their plans would be kept by other keys; a schedule by name is the same for both."""
    said = ranks(2)(wants_at, 1, "auto")
    assert all("planned for: rank 0: forward; rank 1: both passes" in each for each in said), said
    assert ranks(2)(wants_at, 1, "ring") == ["", ""]


def by_variable(here: Here, text: str) -> str:
    os.environ["TOKENRING_SCHEDULE"] = text
    try:
        return str(here.cp(schedule=None).schedule) + " " + str(here.cp(schedule="usp/2").schedule)
    finally:
        del os.environ["TOKENRING_SCHEDULE"]


def test_the_environment_says_what_nobody_says(ranks: RankPools) -> None:
    assert set(ranks(2)(by_variable, "ring")) == {"ring usp/2"}
    assert set(ranks(2)(by_variable, "auto:ring")) == {"auto:ring usp/2"}


def by_wrong_variable(here: Here) -> str:
    try:
        return by_variable(here, "spiral")
    except ConfigurationError as error:
        return str(error)


def test_the_environment_is_checked(ranks: RankPools) -> None:
    assert all("unknown schedule 'spiral'" in text for text in ranks(2)(by_wrong_variable))


# ---------- plans that are given


def a_plan(mask: tr.Mask, length: int = LENGTH, ranks: int = RANKS) -> str:
    size = tr.Workload(1, length, length, HEADS, HEADS, DIM)
    return plan_call(call(setting(full_mesh(ranks, 1.0), size, ("forward", "backward")), mask)).to_json()


def with_plan(here: Here, text: str, length: int, heads: int = HEADS) -> str:
    """Whether it is exact; or the error."""
    try:
        cp = here.cp(schedule=Plan.from_json(text))
        if heads != HEADS:
            q = torch.randn(1, length // here.world_size, heads, DIM)
            tr.attention(q, q, q, cp, mask=tr.Causal())
        return "exact" if exact(cp, length) else "wrong"
    except tr.TokenRingError as error:
        return str(error)


def test_a_plan_that_was_saved_runs(ranks: RankPools) -> None:
    assert set(ranks(RANKS)(with_plan, a_plan(tr.Causal()), LENGTH)) == {"exact"}


def test_a_plan_for_something_else_is_refused(ranks: RankPools) -> None:
    """Another length, another mask, another world, other heads: by what differs."""
    for text, length, why in (
        (a_plan(tr.Causal()), 2 * LENGTH, "was made for q layout zigzag of 256, but the call has zigzag of 512"),
        (a_plan(tr.Full()), LENGTH, "was made for mask full, but the call has causal"),
        (a_plan(tr.Causal(), ranks=2), LENGTH, "the schedule is for 2 ranks, the group has 4"),
    ):
        said = ranks(RANKS)(with_plan, text, length)
        assert all(why in each for each in said), said
    ulysses = plan_call(
        call(
            setting(full_mesh(RANKS, 1.0), tr.Workload(1, LENGTH, LENGTH, 4, 4, DIM)),
            tr.Causal(),
            families=("ulysses",),
        )
    )
    said = ranks(RANKS)(with_plan, ulysses.to_json(), LENGTH, 6)
    assert all("6 query heads" in each for each in said), said


# ---------- arguments, on one rank


class TestArguments:
    @pytest.mark.parametrize("given", ["preset:hgx-h100", 8, {}])
    def test_topology_of_another_type(self, given: object) -> None:
        with pytest.raises(ConfigurationError, match=f"topology is of type {type(given).__name__}; give a Topology"):
            tr.ContextParallel(topology=given)  # type: ignore[arg-type]

    def test_topology_of_another_size(self) -> None:
        with pytest.raises(ConfigurationError, match="the topology has 4 ranks, the group has 1"):
            tr.ContextParallel(topology=full_mesh(4, 1.0))
        assert tr.ContextParallel(topology=full_mesh(1, 1.0)).topology is not None

    @pytest.mark.parametrize("given", [0, -1, "8G", 1.5, True])
    def test_memory_limits_that_are_none(self, given: object) -> None:
        with pytest.raises(ConfigurationError, match=r"memory_limit_bytes=.*: give a positive integer"):
            tr.ContextParallel(memory_limit_bytes=given)  # type: ignore[arg-type]
        assert tr.ContextParallel(memory_limit_bytes=1 << 33).memory_limit_bytes == 1 << 33


class TestWhatRanksComputeWith:
    """A device whose figures nobody knows does not stop a job: others' are taken, and the reason says so."""

    def look(self, model: str | None, device: str) -> tuple[str, tuple[str, ...]]:
        from tokenring.topology.model.facts import Device
        from tokenring.topology.model.graph import Edge, Graph

        ends = tuple(Device(f"g{each}", "accelerator", index=each, model=model) for each in range(2))
        graph = Graph(ends, (Edge("g0", "g1", "nvlink", 1, 25.0, "published"),))
        net, machine = Planner(None, 2, Topology.of(graph), (), None).look(torch.device(device), torch.bfloat16)
        return machine.source, net.notes

    def test_known(self) -> None:
        source, notes = self.look("NVIDIA H100 80GB HBM3", "cuda")
        assert "peak × " in source and "H100" in source and "6.2 µs a message, published" in source
        assert notes == ("shares of published widths are assumed: nvlink 0.85", source)

    @pytest.mark.parametrize("model", ["Quux 9000", None])
    def test_unknown(self, model: str | None) -> None:
        source, notes = self.look(model, "cuda")
        assert "A100" in source
        assert len(notes) == 3
        assert notes[1].startswith("no compute figures of ")
        assert notes[1].endswith("are assumed")
        assert notes[2] == source and source.endswith("10 µs a message, assumed")

    @pytest.mark.parametrize(("count", "threads", "at_once"), [(2, 1, 2.0), (8, 1, None), (8, 4, 2.0), (2, 4, 1.0)])
    def test_ranks_that_share_cores(
        self, count: int, threads: int, at_once: float | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Four ranks of one machine, with a table of rates for so many threads: so many kernels compute at once."""
        from tokenring.planner.choosing import planner

        monkeypatch.setattr(planner, "cores", lambda: count)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        look = Planner(None, 4, None, (), None).look
        net, machine = look(torch.device("cpu"), torch.float32, constant(1.0, "measured"))
        shared = at_once is not None
        assert (machine.shared_cores, machine.kernels_share) == ((at_once, True) if shared else (float("inf"), False))
        assert (f"4 ranks share {count} cores" in net.notes) == shared
        given = Planner(None, 4, full_mesh(4, 1.0), (), None).look(torch.device("cpu"), torch.float32)[1]
        assert not given.kernels_share, "ranks of other machines, for all that is known"

    def test_no_figure_in_this_dtype(self) -> None:
        """910A has no bf16."""
        assert "no peak of 910a in bfloat16" in self.look("910A", "cuda")[1][1]

    def test_each_dtype_has_its_own(self) -> None:
        from tokenring.planner.machines.presets import preset

        planner = Planner(None, 8, preset("hgx-h100"), (), None)
        device = torch.device("cuda")
        rates = [planner.look(device, dtype)[1].rates.forward for dtype in (torch.float32, torch.bfloat16)]
        assert rates[0] != rates[1]


@pytest.mark.parametrize("text", ["auto", "auto:usp", "auto:tiles,usp/2", "auto:packed"])
def test_one_rank_has_nothing_to_move(text: str) -> None:
    """Also where only families are allowed that need two ranks."""
    cp = tr.ContextParallel(schedule=text)
    assert exact(cp)
    q = torch.randn(1, 16, 2, 8)
    assert tr.plan(q, q, q, cp, tr.Causal()).reason == "nothing has to move"
