"""Context parallelism over some of the ranks: groups, meshes, and several at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Case, Local, check_exact
from oracle import Attention
from ranks import Here, RankPools
from torch.distributed.device_mesh import init_device_mesh

from tokenring import ContextParallel, attention, shard, unshard
from tokenring.backends.auto import AutoTransport
from tokenring.backends.gloo import GlooTransport
from tokenring.backends.shm import ShmTransport


def case_of(world_size: int, schedule: str = "tokenring", batch: int = 2) -> Case:
    return Case(world_size, schedule, "zigzag", "causal", 4, 2, batch, 16, torch.float32, None)


def compute(cp: ContextParallel, case: Case) -> Local:
    q, k, v, dout = (shard(x, cp).requires_grad_(i < 3) for i, x in enumerate(case.inputs()))
    out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
    return Local(Attention(out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)), {})


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
