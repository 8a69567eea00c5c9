"""One host that stands for all: as exact as simulating every rank; schemes that differ by host are refused."""

from __future__ import annotations

import pytest
from nets import BOTH, clusters, named, setting, workload

from tokenring.errors import ConfigurationError
from tokenring.planner.fold import FoldedNet, folded, symmetry_of
from tokenring.planner.operations import operations
from tokenring.planner.predict import predict
from tokenring.planner.simulate import simulate
from tokenring.schedule.build import Pair, Scheme
from tokenring.schedule.families.registry import parse
from tokenring.schedule.ir import Pass
from tokenring.schedule.lower import lower
from tokenring.schedule.routes import Hop, Origin, direct

LOCAL, HOSTS = 4, 3
RANKS = LOCAL * HOSTS
SIZE = workload(RANKS, (12, 12), 192)
NAMES = (
    "ring", "tokenring", "direct-kv", "direct-q", "ulysses", "usp/4", "double-ring/4", "case-iii/4", "relay/4",
    "reduced/4", "mesh-kv/3x4",
)  # fmt: skip


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_as_exact_as_every_rank(name: str, direction: Pass) -> None:
    net = clusters(HOSTS, LOCAL)
    asked = setting(net, SIZE, (direction,), tflops=0.5)
    scheme = parse(name).make(RANKS)
    symmetry = symmetry_of(scheme, RANKS, LOCAL)
    schedule = folded(scheme, SIZE.q_length, SIZE.kv_length, symmetry)
    programs = [
        operations(schedule, SIZE, lower(schedule, rank, direction, SIZE), asked.machine.rates) for rank in range(LOCAL)
    ]
    found = simulate(FoldedNet(net), programs, asked.machine.messages, canonical=symmetry.canonical)
    exact = predict(named(name, RANKS, SIZE.q_length), asked)
    assert found.seconds == pytest.approx(exact.seconds, rel=0.01)


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
