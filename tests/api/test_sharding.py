"""Between whole sequences and the ranks' parts: there and back, and with gradients."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS
from ranks import Here, RankPools
from torch._subclasses import FakeTensorMode

from tokenring import ConfigurationError, ContextParallel, PeerLost, positions, shard, unshard
from tokenring.api import sharding
from tokenring.sequence.layout import Layout, zigzag
from tokenring.sequence.workload import Lengths

LENGTH = 96


def whole(dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """LENGTH along `dim`; every element differs."""
    shape = [2, 3, 2, 2]
    shape[dim] = LENGTH
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def there_and_back(here: Here, layout: str, dim: int, dtype: torch.dtype) -> bool:
    cp = here.cp(layout=layout)
    x = whole(dim, dtype)
    part = shard(x, cp, dim)
    at = positions(cp, LENGTH)
    assert at.dtype == torch.int64 and at.tolist() == cp.layout_for(LENGTH).positions(here.rank)
    assert part.shape[dim] == LENGTH // here.world_size
    assert torch.equal(part, x.index_select(dim, at))
    strided = part.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.equal(unshard(part, cp, dim), x) and torch.equal(unshard(strided, cp, dim), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_there_and_back(layout: str, world_size: int, ranks: RankPools) -> None:
    for dim in (0, 1, 3, -1, -2):
        assert all(ranks(world_size)(there_and_back, layout, dim, torch.float32))
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        assert all(ranks(world_size)(there_and_back, layout, 1, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_are_a_partition(layout: str, ranks: RankPools) -> None:
    held = ranks(4)(held_positions, layout)
    assert sorted(p for each in held for p in each) == list(range(LENGTH))


def held_positions(here: Here, layout: str) -> list[int]:
    held: list[int] = positions(here.cp(layout=layout), LENGTH, "cpu").tolist()
    return held


def gradient_of_shard(here: Here, layout: str) -> torch.Tensor:
    """Of a loss that weighs this rank's part by 2."""
    x = whole(1).requires_grad_()
    (gradient,) = torch.autograd.grad((2 * shard(x, here.cp(layout=layout))).sum(), x)
    return gradient


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_shard(layout: str, ranks: RankPools) -> None:
    """Zero where other ranks hold the positions."""
    for gradient, held in zip(ranks(4)(gradient_of_shard, layout), ranks(4)(held_positions, layout), strict=True):
        wanted = torch.zeros_like(gradient)
        wanted[:, held] = 2
        assert torch.equal(gradient, wanted)


def gradient_of_unshard(here: Here, layout: str, dim: int) -> torch.Tensor:
    """Of a loss in which rank r weighs its copy of the whole by (r + 1) · 2^(position mod 8)."""
    cp = here.cp(layout=layout)
    part = shard(whole(dim), cp, dim).requires_grad_()
    weights = (here.rank + 1) * 2.0 ** (torch.arange(LENGTH) % 8)
    shape = [1] * 4
    shape[dim] = LENGTH
    (gradient,) = torch.autograd.grad((unshard(part, cp, dim) * weights.view(shape)).sum(), part)
    return gradient


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_gradient_of_unshard(layout: str, dim: int, world_size: int, ranks: RankPools) -> None:
    """The sum over the ranks of what their copies got, at the right positions."""
    total = sum(range(1, world_size + 1))
    made = ranks(world_size)(gradient_of_unshard, layout, dim)
    for gradient, held in zip(made, ranks(world_size)(held_positions, layout), strict=True):
        wanted = total * 2.0 ** (torch.tensor(held) % 8)
        assert torch.equal(gradient, wanted.view(-1, 1, 1).expand_as(gradient.movedim(dim, -3)).movedim(-3, dim))


def sum_of_parts(here: Here) -> bool:
    """A loss that each rank takes of its own part of an unsharded tensor is the loss of the parts."""
    cp = here.cp(layout="zigzag")
    part = shard(whole(1), cp).requires_grad_()
    (gradient,) = torch.autograd.grad(shard(unshard(part, cp), cp).square().sum(), part)
    return torch.equal(gradient, 2 * part.detach())


def test_shard_after_unshard_is_nothing(ranks: RankPools) -> None:
    assert all(ranks(3)(sum_of_parts))


# ---------- indices are made once


class Watched:
    """A context whose layout counts how often it lists its positions."""

    def __init__(self) -> None:
        self.cp = ContextParallel(layout=replace(zigzag(1, LENGTH), name=f"watched {next(NUMBERS)}"))
        self.listed = 0

    def __enter__(self) -> Watched:
        positions = Layout.positions

        def counted(layout: Layout, rank: int) -> list[int]:
            self.listed += 1
            return positions(layout, rank)

        self._patched = pytest.MonkeyPatch()
        self._patched.setattr(Layout, "positions", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self._patched.undo()


NUMBERS = count()


def test_positions_are_listed_once() -> None:
    with Watched() as seen:
        for _ in range(3):
            assert torch.equal(unshard(shard(whole(1), seen.cp), seen.cp), whole(1))
        assert seen.listed == 2


def test_what_positions_gives_may_be_changed() -> None:
    with Watched() as seen:
        for _ in range(2):
            assert torch.equal(shard(whole(1), seen.cp), whole(1))
            positions(seen.cp, LENGTH).zero_()


def test_inference_before_training() -> None:
    """What inference mode makes cannot be saved for backward."""
    with Watched() as seen:
        with torch.inference_mode():
            unshard(shard(whole(1), seen.cp), seen.cp)
        x = whole(1).requires_grad_()
        unshard(shard(x, seen.cp), seen.cp).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and bool((x.grad == 1).all())


def test_fake_tensors_before_real_ones() -> None:
    """A mode that makes other tensors, as torch.compile's, leaves none behind."""
    with Watched() as seen:
        with FakeTensorMode() as mode:
            assert shard(mode.from_tensor(whole(1)), seen.cp).shape == whole(1).shape
        assert torch.equal(shard(whole(1), seen.cp), whole(1))
        with FakeTensorMode() as mode:
            shard(mode.from_tensor(whole(1)), seen.cp)


@pytest.mark.parametrize(("device", "limits"), [("cpu", [(timedelta(seconds=7),)]), ("cuda", [()])])
def test_only_a_cpu_waits_with_a_limit(device: str, limits: list[Any]) -> None:
    """On others that would hold up the host until the device is done."""
    given: list[Any] = []
    work = SimpleNamespace(wait=lambda *limit: given.append(limit))
    sharding.finish(work, ContextParallel(timeout_seconds=7), "unshard", torch.device(device))
    assert given == limits


def test_a_lost_peer_is_named_without_making_a_transport() -> None:
    """All ranks would have to come to that, and one is lost: take the one that there is for these tensors."""

    class OfAccelerators:
        world_size, rank = 2, 0

        def made_transport(self, device: torch.device) -> Any:
            return SimpleNamespace(lost=lambda peer, *said: PeerLost(f"rank {peer} {said}"))

        @property
        def transport(self) -> Any:
            raise AssertionError("a transport was made")

    def wait() -> None:
        raise RuntimeError("the group has ended")

    cp: Any = OfAccelerators()
    with pytest.raises(PeerLost, match=r"rank 1 .*took part in unshard"):
        sharding.finish(SimpleNamespace(wait=wait), cp, "unshard", torch.device("cuda"))


def refused(here: Here, what: str) -> str:
    cp = here.cp(layout="zigzag")
    try:
        if what == "length":
            shard(torch.zeros(1, 0, 2), cp)
        if what == "positions":
            positions(cp, 0)
        if what == "lengths":
            unshard(torch.zeros(1, 8 if here.rank else 16, 2), cp)
        if what == "shapes":
            unshard(torch.zeros(1, 8, 2 if here.rank else 3), cp)
        if what == "dtypes":
            unshard(torch.zeros(1, 8, 2, dtype=torch.bfloat16 if here.rank else torch.float32), cp)
        if what == "dims":
            unshard(torch.zeros(8, 8), cp, here.rank)
        if what == "uneven":
            unshard(torch.zeros(1, 9, 2), cp)
    except ConfigurationError as error:
        return str(error)
    return "nothing"


EMPTY = "layout 'zigzag': length is 0; give a positive integer"
AS_SHARD = "unshard expects parts as shard makes them: of"
PARTS = "unshard expects parts of one shape, dtype and dim from every rank; found"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("length", EMPTY),
        ("positions", EMPTY),
        ("uneven", f"{AS_SHARD} 18 positions the ranks hold 8, 10; found 9, 9"),
        ("lengths", f"{AS_SHARD} 24 positions the ranks hold 12, 12; found 16, 8"),
        ("shapes", f"{PARTS} rank 0: float32 [1, 8, 3] along 1, rank 1: float32 [1, 8, 2] along 1"),
        ("dtypes", f"{PARTS} rank 0: float32 [1, 8, 2] along 1, rank 1: bfloat16 [1, 8, 2] along 1"),
        ("dims", f"{PARTS} rank 0: float32 [8, 8] along 0, rank 1: float32 [8, 8] along 1"),
    ],
)
def test_refused(what: str, says: str, ranks: RankPools) -> None:
    assert ranks(2)(refused, what) == [says] * 2


class Failing:
    """A collective call whose wait fails: without a frame that has the call, as one of torch's."""

    @staticmethod
    def wait(limit: object = None) -> None:
        raise RuntimeError("connection closed by peer")


@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_an_error_that_is_kept_holds_no_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames would: a thread of the group's would free the work when Python is gone."""
    made: list[weakref.ref[Failing]] = []

    def start(*given: object, **options: object) -> Failing:
        work = Failing()
        made.append(weakref.ref(work))
        return work

    transport = SimpleNamespace(lost=lambda *said: PeerLost(str(said), 1), exchange_text=lambda text, what: [text] * 2)
    cp: Any = SimpleNamespace(
        world_size=2, rank=0, group=None, turn=nullcontext(), timeout_seconds=1.0, transport=transport,
        made_transport=lambda device: transport, lengths=Lengths("contiguous", 0, 2),
    )
    monkeypatch.setattr(dist, name, start)
    function: Any = sharding._Gather if name == "all_gather" else sharding._Sum
    with pytest.raises(PeerLost) as caught:
        function.apply(torch.ones(1, 4), cp, 1, None, "")
    assert caught.value.__traceback__ is not None and made[0]() is None
