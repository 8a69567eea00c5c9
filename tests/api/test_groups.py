"""Context parallelism over some of the ranks: groups, meshes, and several at once."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from cases import Case, Local, check_exact, compute
from faults import free_port
from oracle import Attention
from ranks import Here, RankPools
from torch.distributed.device_mesh import init_device_mesh

from tokenring import ContextParallel, attention, shard, unshard
from tokenring.backends.transports.auto import AutoTransport
from tokenring.backends.transports.gloo import GlooTransport
from tokenring.backends.transports.shm import ShmTransport

transports = pytest.mark.parametrize("transport", ["gloo", "shm"])


def case_of(world_size: int, schedule: str = "tokenring", batch: int = 2) -> Case:
    return Case(world_size, schedule, "zigzag", "causal", 4, 2, batch, 16, torch.float32, None)


def on_mesh(here: Here) -> Local:
    mesh = init_device_mesh("cpu", (here.world_size,))
    return compute(ContextParallel(mesh, schedule="tokenring"), case_of(here.world_size))


def test_device_mesh(ranks: RankPools) -> None:
    check_exact(case_of(3).whole(ranks(3)(on_mesh)), case_of(3).reference())


def on_both_axes(here: Here) -> tuple[Local, Local]:
    """Two contexts of one rank, over the two axes of a mesh: their groups overlap in this rank only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    rows, columns = (ContextParallel(mesh[name], schedule="ring") for name in ("rows", "columns"))
    assert rows.rank == here.rank // 2 and columns.rank == here.rank % 2
    return compute(columns, case_of(2, "ring")), compute(rows, case_of(2, "ring", 3))


def test_axes_of_a_mesh(ranks: RankPools) -> None:
    made = ranks(4)(on_both_axes)
    for pair in ((0, 1), (2, 3)):
        check_exact(case_of(2).whole([made[rank][0] for rank in pair]), case_of(2).reference())
    for pair in ((0, 2), (1, 3)):
        case = case_of(2, batch=3)
        check_exact(case.whole([made[rank][1] for rank in pair]), case.reference())


def on_some_ranks(here: Here, members: list[int]) -> Local | None:
    """The others make no context, and do something else."""
    group = dist.new_group(members)
    if here.rank not in members:
        return None
    cp = ContextParallel(group, schedule="tokenring")
    assert (cp.rank, cp.world_size) == (members.index(here.rank), len(members))
    made = compute(cp, case_of(len(members)))
    assert torch.equal(unshard(shard(torch.arange(96.0)[None], cp), cp), torch.arange(96.0)[None])
    return made


@pytest.mark.parametrize("members", [[0, 1], [1, 2, 3], [0, 3], [2]])
def test_a_group_of_some_ranks(members: list[int], ranks: RankPools) -> None:
    made = ranks(4)(on_some_ranks, members)
    assert [rank for rank, each in enumerate(made) if each is not None] == members
    case = case_of(len(members))
    check_exact(case.whole([each for each in made if each is not None]), case.reference())


def disjoint_and_world(here: Here) -> tuple[Local, Local]:
    """A context of a pair and one of the world, forwards before backwards; the pairs do not run in step."""
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    inner = ContextParallel(pairs[here.rank // 2], schedule="direct-kv")
    outer = here.cp(schedule="ring")
    small, large = case_of(2, batch=1 + here.rank // 2), case_of(4)
    for _ in range(1 + 3 * (here.rank // 2)):
        made = compute(inner, small)
    return made, compute(outer, large)


def test_disjoint_groups_at_once(ranks: RankPools) -> None:
    made = ranks(4)(disjoint_and_world)
    for number, pair in enumerate(((0, 1), (2, 3))):
        case = case_of(2, batch=1 + number)
        check_exact(case.whole([made[rank][0] for rank in pair]), case.reference())
    check_exact(case_of(4).whole([each[1] for each in made]), case_of(4).reference())


def overlapping(here: Here) -> list[Local]:
    """Contexts of groups that overlap, made in different orders at different ranks."""
    groups = {members: dist.new_group(list(members)) for members in ((0, 1), (1, 2), (0, 1, 2))}
    mine = [members for members in groups if here.rank in members]
    return [compute(ContextParallel(groups[members], schedule="ring"), case_of(len(members))) for members in mine]


def test_overlapping_groups(ranks: RankPools) -> None:
    made = ranks(3)(overlapping)
    check_exact(case_of(2).whole([made[0][0], made[1][0]]), case_of(2).reference())
    check_exact(case_of(2).whole([made[1][1], made[2][0]]), case_of(2).reference())
    check_exact(case_of(3).whole([each[-1] for each in made]), case_of(3).reference())


def two_at_once(here: Here, transport: str) -> list[Local]:
    """Two groups of the same ranks: the passes of one between those of the other."""
    groups = [dist.new_group(list(range(here.world_size))) for _ in range(2)]
    contexts = [
        ContextParallel(group, schedule=schedule, transport=transport)
        for group, schedule in zip(groups, ("ring", "direct-q"), strict=True)
    ]
    made = []
    for turn in range(3):
        cases = [case_of(here.world_size, batch=1 + (turn + which) % 3) for which in range(2)]
        halves = [Halves(cp, case) for cp, case in zip(contexts, cases, strict=True)]
        made += [half.backward() for half in halves[:: 1 if turn else -1]][:: 1 if turn else -1]
    for cp in contexts:
        cp.close()
    return made


class Halves:
    """Forward, and later backward."""

    def __init__(self, cp: ContextParallel, case: Case) -> None:
        self.cp, self.case = cp, case
        self.q, self.k, self.v, self.dout = (shard(x, cp).requires_grad_(i < 3) for i, x in enumerate(case.inputs()))
        self.out, self.lse = attention(self.q, self.k, self.v, cp, case.mask, return_lse=True)

    def backward(self) -> Local:
        gradients = torch.autograd.grad(self.out, (self.q, self.k, self.v), self.dout)
        return Local(Attention(self.out.detach(), self.lse.detach(), *gradients), {})


@transports
def test_two_groups_of_the_same_ranks(transport: str, ranks: RankPools) -> None:
    made = ranks(3)(two_at_once, transport)
    for number in range(6):
        case = case_of(3, batch=1 + (number // 2 + number % 2) % 3)
        check_exact(case.whole([each[number] for each in made]), case.reference())


GROUPS: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3))


def in_any_order(here: Here, transport: str, rounds: int) -> list[dict[tuple[int, ...], Local]]:
    """Groups within groups and groups that overlap. Some order of all calls goes round, of which each rank makes its
    own: so neighbours never agree on what comes next, but nobody waits in a circle. Backwards in another order."""
    groups = {members: dist.new_group(list(members)) for members in GROUPS}
    contexts: dict[tuple[int, ...], ContextParallel] = {}
    some, made = random.Random(0), []
    for _ in range(rounds):
        halves: dict[tuple[int, ...], Halves] = {}
        for members in some.sample(GROUPS, len(GROUPS)):
            if here.rank in members:
                if members not in contexts:
                    contexts[members] = ContextParallel(groups[members], schedule="tokenring", transport=transport)
                halves[members] = Halves(contexts[members], case_of(len(members)))
        order = some.sample(GROUPS, len(GROUPS))
        made.append({members: halves[members].backward() for members in order if members in halves})
        closed = some.choice(GROUPS)
        if closed in contexts:
            contexts.pop(closed).close()
    return made


@transports
def test_nested_and_overlapping_groups_in_any_order(transport: str, ranks: RankPools) -> None:
    made = ranks(4)(in_any_order, transport, 3)
    for number in range(3):
        for members in GROUPS:
            case = case_of(len(members))
            check_exact(case.whole([made[rank][number][members] for rank in members]), case.reference())


def ten_worlds(here: Here, transport: str, ports: list[int]) -> list[Local]:
    """A process group from its birth to its end, ten times; every other context is closed, the others are dropped."""
    made = []
    dist.destroy_process_group()
    for number, port in enumerate(ports):
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=here.rank, world_size=here.world_size)
        cp = ContextParallel(schedule="ring", transport=transport)
        made.append(compute(cp, case_of(here.world_size, batch=1 + number % 2)))
        if number % 2:
            cp.close()
        del cp
        dist.barrier()
        dist.destroy_process_group()
    return made


@transports
def test_ten_groups_one_after_the_other(transport: str, ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        made = some(ten_worlds, transport, [free_port() for _ in range(10)])
    for number in range(10):
        case = case_of(2, batch=1 + number % 2)
        check_exact(case.whole([each[number] for each in made]), case.reference())


def closed_and_opened(here: Here) -> list[Local]:
    """A transport is closed and another is made for the same group."""
    made = []
    for name, kind in (("gloo", GlooTransport), ("shm", ShmTransport), ("auto", AutoTransport)):
        cp = ContextParallel(schedule="tokenring", transport=name)
        made.append(compute(cp, case_of(here.world_size)))
        assert isinstance(cp.transport, kind)
        cp.transport.close()
    return made


def test_transports_one_after_the_other(ranks: RankPools) -> None:
    made = ranks(2)(closed_and_opened)
    for number in range(3):
        check_exact(case_of(2).whole([each[number] for each in made]), case_of(2).reference())
