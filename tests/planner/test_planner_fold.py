"""One host that stands for all: as exact as simulating every rank; schemes that differ by host are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest
from nets import BOTH, clusters, named, of_hosts, setting, with_network, workload

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import Pass
from tokenring.lowering.footprint import link_bytes
from tokenring.lowering.lower import lower
from tokenring.lowering.target import Target
from tokenring.planner.choosing.folded_world import DEPTHS, DrawnOut, FoldedWorld
from tokenring.planner.choosing.folding import Folding
from tokenring.planner.choosing.select import ROUNDING
from tokenring.planner.choosing.symmetry import FoldedNet, Symmetry, symmetry_of
from tokenring.planner.interconnects.interconnect import LinkFabric
from tokenring.planner.interconnects.rank_order import good_order
from tokenring.planner.simulation.operations import Operation, SimulatedPost, operations
from tokenring.planner.simulation.predict import Setting, predict
from tokenring.planner.simulation.simulate import TakesLonger, simulate
from tokenring.schedule.families.registry import parse
from tokenring.schedule.names import named_schedule
from tokenring.schedule.routes import Hop, Origin, direct
from tokenring.schedule.scheme import Pair, Scheme
from tokenring.sequence.layout import make_layout
from tokenring.tables.rates import Messages

LOCAL, HOSTS = 4, 3
RANKS = LOCAL * HOSTS
SIZE = workload(RANKS, (12, 12), 192)
NAMES = (
    "ring", "tokenring", "direct-kv", "direct-q", "ulysses", "usp/4", "double-ring/4", "case-iii/4", "relay/4",
    "reduced/4", "mesh-kv/3x4",
)  # fmt: skip


def folded_seconds(name: str, asked: Setting) -> float:
    """By one host, of the only pass that is asked for."""
    net, size, (direction,) = asked.interconnect, asked.workload, asked.passes
    scheme, early = parse(name).make(net.world_size), asked.early_receives
    symmetry = symmetry_of(scheme, net.world_size, LOCAL)
    schedule = Folding(scheme, size.q_length, size.kv_length, symmetry).schedule()
    target = Target(early_receives=early)
    lowered = [lower(schedule, rank, direction, size, target) for rank in range(LOCAL)]
    programs = [operations(schedule, size, each, asked.machine.rates) for each in lowered]
    return simulate(FoldedNet(net), programs, asked.machine.messages, canonical=symmetry.canonical).seconds


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_as_exact_as_every_rank(name: str, direction: Pass) -> None:
    asked = setting(clusters(HOSTS, LOCAL), SIZE, (direction,), tflops=0.5)
    exact = predict(named(name, RANKS, SIZE.q_length), asked)
    assert folded_seconds(name, asked) == pytest.approx(exact.seconds, rel=0.01)


CROSSED = (0, 2, 1, 3)  # the devices of a host round its ring


@pytest.mark.parametrize("name", ["ring", "tokenring", "double-ring/4", "usp/4"])
def test_ranks_stand_where_schedules_have_them(name: str) -> None:
    """Fold in the good order in which schedules are made, of hosts whose devices are not numbered round their ring."""
    near = {(CROSSED[at], CROSSED[(at + by) % LOCAL]) for at in range(LOCAL) for by in (1, -1)}
    ways = {(a, b): (f"{a}>{b}" if (a, b) in near else "root",) for a, b in permutations(range(LOCAL), 2)}
    gbs = {way[0]: 0.1 if way == ("root",) else 1.0 for way in ways.values()}
    net = of_hosts("crossed", with_network(LinkFabric(LOCAL, ways, gbs), 1.0), HOSTS)
    order = good_order(net)
    assert list(order) != sorted(order)
    asked = setting(net, SIZE, BOTH[:1], tflops=0.5)
    layout = make_layout("contiguous", RANKS, SIZE.q_length)
    exact = predict(named_schedule(name, SIZE, layout, layout, tr.Full(), order=order), asked)
    folded = FoldedWorld(name, asked, 1.0, HOSTS, LOCAL).one_pass("forward")
    assert folded.seconds == pytest.approx(exact.seconds, rel=0.01)
    as_numbered = predict(named_schedule(name, SIZE, layout, layout, tr.Full()), asked)
    assert name == "usp/4" or as_numbered.seconds > 1.2 * exact.seconds


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_wires_bound_a_pass(name: str, direction: Pass) -> None:
    """What the busiest wire needs for its bytes alone is counted without a program, and is what the simulation saw."""
    asked = setting(clusters(HOSTS, LOCAL), SIZE, (direction,), tflops=0.5)
    world = FoldedWorld(name, asked, 1.0, HOSTS, LOCAL)
    found = world.one_pass(direction)
    assert world.wire_seconds(direction) == pytest.approx(found.worst_wire_seconds)
    assert world.least_seconds(direction) <= found.seconds * ROUNDING


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("hosts", [3, 4])
@pytest.mark.parametrize("name", ["ring", "tokenring", "direct-kv", "direct-q", "usp/4", "double-ring/4"])
def test_where_a_pair_has_one_queue(name: str, hosts: int, channels: int) -> None:
    """Both directions between two hosts take turns, as hccl/channel and hccl/pair have it; four hosts have opposite
    ones, where one transfer stands for both. NICs are so wide that queues count."""
    net, ranks = clusters(hosts, LOCAL, nic_gbs=8.0), hosts * LOCAL
    size, messages = workload(ranks, (12, 12), 192), Messages(pair_serial=True, channels=channels)
    asked = setting(net, size, ("backward",), tflops=0.5, messages=messages)
    exact = predict(named(name, ranks, size.q_length), asked)
    assert folded_seconds(name, asked) == pytest.approx(exact.seconds, rel=0.05)


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_both_directions_take_turns(hosts: int) -> None:
    """Each rank, alone on its host, sends 1 µs to each other: both ways at once, or in turns in one queue."""
    net = clusters(hosts, 1, nic_gbs=hosts - 1.0)
    peers = [[(rank + each) % hosts for each in range(1, hosts)] for rank in range(hosts)]
    programs: list[list[Operation]] = [
        [SimulatedPost(2 * at + way, peer, "a", 1000, not way, 0, "") for at, peer in enumerate(mine) for way in (0, 1)]
        for mine in peers
    ]
    for serial, wanted in ((False, 1e-6), (True, 2e-6)):
        messages = Messages(pair_serial=serial, flow_gbs=1.0)
        canonical = Symmetry(hosts, 1).canonical
        found = simulate(FoldedNet(net), programs[:1], messages, canonical=canonical)
        assert simulate(net, programs, messages).seconds == pytest.approx(wanted, rel=1e-2)
        assert found.seconds == pytest.approx(wanted, rel=1e-2)


def odd_host() -> Scheme:
    """Host 0 gets everything it needs straight, the others a detour."""

    def gather(origin: Origin) -> tuple[Hop, ...]:
        hops = direct(origin)
        return hops if origin.owner < LOCAL else tuple(hop._replace(step=hop.step + 1) for hop in hops)

    return Scheme("odd", lambda pair: pair.q_owner, gather_kv=gather)


def odd_place() -> Scheme:
    def place(pair: Pair) -> int:
        return pair.kv_owner if pair.q_owner < LOCAL else pair.q_owner

    return Scheme("odd-place", place, direct, direct)


@pytest.mark.parametrize("scheme", [odd_host(), odd_place()], ids=lambda scheme: scheme.name)
def test_refuses_hosts_that_differ(scheme: Scheme) -> None:
    with pytest.raises(ConfigurationError, match=f"{scheme.name!r} does not do the same on every host"):
        symmetry_of(scheme, RANKS, LOCAL)


@pytest.mark.parametrize("name", ["ulysses", "packed/2", "sub-sharded/6x2x1/pieces2", "sub-sharded/3x2x2"])
def test_tiles_of_whole_rows_are_those_of_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tiles go by their q, they are made row by row: the same schedule as pair by pair."""
    scheme = parse(name).make(RANKS)
    symmetry = symmetry_of(scheme, RANKS, LOCAL)
    by_pair = Folding(replace(scheme, timed_by_q=False), 768, 768, symmetry).schedule()
    monkeypatch.delattr(Folding, "_pairs")
    assert Folding(scheme, 768, 768, symmetry).schedule() == by_pair


@pytest.mark.parametrize("name", [*NAMES, "packed/2", "all-gather-kv", "sub-sharded/6x2x1/pieces2", "mesh-q/3x4"])
def test_what_is_counted_is_what_is_made(name: str) -> None:
    """Bytes on links before there are moves; and a rank's program, of its own moves alone, is that of all of host 0."""
    scheme, size = parse(name).make(RANKS), workload(RANKS, (12, 12), 192)
    found = Folding(scheme, size.q_length, size.kv_length, symmetry_of(scheme, RANKS, LOCAL))
    whole = found.schedule()
    for direction, rank in product(BOTH, (0, LOCAL - 1)):
        links = link_bytes(whole, size, direction)
        assert found.link_bytes(size, direction) == {link: n for link, n in links.items() if link[0] < LOCAL}
        of_rank = found.schedule(rank)
        assert len(of_rank.moves) < len(whole.moves)
        for target in (Target(), Target(early_receives=False)):
            program = lower(whole, rank, direction, size, target)
            assert lower(of_rank, rank, direction, size, target) == program


@pytest.mark.parametrize("name", ["ring", "tokenring", "usp/4", "case-iii/4"])
def test_bounds_look_deeper(name: str) -> None:
    """Each look finds no less, and no more than what is simulated; drawn out from few hosts as well."""
    asked = setting(clusters(16, LOCAL), workload(16 * LOCAL, (12, 12), 192), BOTH, tflops=0.5)
    few, twice, whole = (FoldedWorld(name, asked, 1.0, hosts, LOCAL) for hosts in (2, 4, 16))
    worlds: tuple[FoldedWorld | DrawnOut, ...] = whole, DrawnOut(few, twice, 7.0)
    for direction, world in product(BOTH, worlds):
        bounds = [world.least_seconds(direction, depth) for depth in DEPTHS]
        seconds = world.one_pass(direction).seconds
        assert bounds == sorted(bounds)
        assert bounds[-1] <= seconds * ROUNDING
        assert bounds[-1] >= 0.7 * seconds  # a bound of nothing would hold, too


def test_a_pass_that_takes_longer() -> None:
    """Drawn out, twice as many hosts are simulated no longer than the line may rise."""
    asked = setting(clusters(16, LOCAL), workload(16 * LOCAL, (12, 12), 192), BOTH, tflops=0.5)
    worlds = [FoldedWorld("ring", asked, 1.0, hosts, LOCAL) for hosts in (2, 4)]
    seconds = DrawnOut(worlds[0], worlds[1], 7.0).one_pass("backward").seconds
    for share in (0.5, 0.99):
        fresh = DrawnOut(worlds[0], FoldedWorld("ring", asked, 1.0, 4, LOCAL), 7.0)
        with pytest.raises(TakesLonger):
            fresh.one_pass("backward", share * seconds)
    assert fresh.one_pass("backward", 1.01 * seconds).seconds == seconds
