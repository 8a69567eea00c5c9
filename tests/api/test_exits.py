"""Scripts end as they should: nothing keeps a process group that torch.distributed has destroyed.

A group that is kept keeps its threads. One of them frees the last collective's tensors, and waits for the interpreter
to do so; where that ends meanwhile, the process aborts. So what counts is that a group is gone when it is destroyed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import exit_ranks
import pytest
import torch
import torch.distributed as dist
from machines import APART, transport_name
from patience import patient
from ranks import PEER_SECONDS, Here, RankPools
from sampling import FULL_GRID

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel, PeerLost, attention, unshard
from tokenring.integrations.megatron.contexts import contexts_of
from tokenring.launch.groups import HeldGroup

Kept = list[Any]


def tensors() -> torch.Tensor:
    return torch.ones(1, 8, 2, 16)


def calls(cp: ContextParallel) -> None:
    x = tensors().requires_grad_()
    unshard(attention(x, x, x, cp), cp).sum().backward()  # type: ignore[no-untyped-call]


def used(group: Any, name: str) -> Kept:
    """A context after its calls; what else has it has it too."""
    cp = ContextParallel(group, transport=name, timeout_seconds=PEER_SECONDS)
    calls(cp)
    return [cp]


def closed(group: Any, name: str) -> Kept:
    (cp,) = used(group, name)
    cp.close()
    return [cp]


def sharing(group: Any, name: str) -> Kept:
    """A transport that several have, and what was made of it."""
    (cp,) = used(group, name)
    other = ContextParallel(group, "contiguous", transport=cp.transport)
    calls(other)
    return [cp, other, cp.transport]


def graph(group: Any, name: str) -> Kept:
    """A graph of autograd that nobody went backward through."""
    (cp,) = used(group, name)
    x = tensors().requires_grad_()
    return [unshard(attention(x, x, x, cp), cp)]


def of_layers(group: Any, name: str) -> Kept:
    """What Megatron's layers share is kept in their module, for as long as the group lives."""
    cp = contexts_of(group, {"transport": name, "timeout_seconds": PEER_SECONDS}).context("ring")
    calls(cp)
    return [cp]


def refused(group: Any, name: str) -> Kept:
    """Errors of calls on which ranks disagree."""
    (cp,), gone = used(group, name), weakref.ref(group)
    del group  # of this frame, which the errors have
    rank, x = cp.rank, tensors()
    kept: Kept = [cp]
    for call in (
        lambda: attention(x, x, x, cp, scale=1.0 + rank),
        lambda: unshard(x[:, : 4 + rank], cp),
        lambda: ContextParallel(gone(), layout="no such layout"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        kept.append(caught.value)
    return kept


def lost(group: Any, name: str) -> Kept:
    """The error of a peer that does not come: the transport remembers that it is broken, not where it was found."""
    cp = ContextParallel(group, transport=name, timeout_seconds=patient(1.0))
    calls(cp)
    if cp.rank == 0:
        with pytest.raises(PeerLost) as caught:
            _with_the_group(cp, group)
        del caught
    return [cp]


def _with_the_group(cp: ContextParallel, group: Any) -> None:
    """A frame of the user's own that has the group."""
    x = tensors()
    assert group is not None
    attention(x, x, x, cp)


def not_met(group: Any, name: str) -> Kept:
    """The error of a rank that does not come when a transport is made."""
    cp = ContextParallel(group, transport=name, timeout_seconds=1.0)
    del group
    if cp.rank == 1:
        return [cp]
    with pytest.raises(PeerLost) as caught:
        _ = cp.transport
    return [cp, caught.value]


def group_is_gone(here: Here, name: str, use: Callable[[Any, str], Kept]) -> tuple[bool, bool, str]:
    """Whether a group goes when it is destroyed, with what was made of it kept; and the thread names that are left."""
    gc.collect()
    before = loops()
    with transport_name(name) as known:
        group = dist.new_group(list(range(here.world_size)))
        gone = weakref.ref(group)
        gc.disable()
        try:
            kept = use(group, known)
            del group
            dist.barrier()
            dist.destroy_process_group(gone())
            return gone() is None, loops() <= before, said_after(kept)
        finally:
            gc.enable()


def loops() -> int:
    """Threads of torch's Gloo groups that do their collectives."""
    threads = Path("/proc/self/task").iterdir()
    return sum("gloo_runloop" in (each / "comm").read_text() for each in threads)


def said_after(kept: Kept) -> str:
    """What the contexts say to further calls."""
    said = ""
    x = tensors()
    for cp in filter(lambda each: isinstance(each, ContextParallel), kept):
        for call in (lambda of: attention(x, x, x, of), lambda of: unshard(x, of), lambda of: of.group):
            with pytest.raises(ConfigurationError) as caught:
                call(cp)
            said = str(caught.value)
        cp.close()
    return said


@pytest.fixture(scope="module")
def spent() -> Iterator[RankPools]:
    """Ranks of this module alone: some of their groups are broken."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.mark.parametrize("name", ["shm", "gloo", APART])
@pytest.mark.parametrize("use", [used, closed, sharing, graph, of_layers, refused, lost, not_met])
def test_a_destroyed_group_is_gone(spent: RankPools, use: Callable[[Any, str], Kept], name: str) -> None:
    """At once: not when the garbage collector comes by. On ranks that others have too while all goes well."""
    some = spent(2)
    try:
        for gone, ended, said in some(group_is_gone, name, use):
            assert gone, "something keeps the group"
            assert ended or "gloo" in name, "threads of the group are left"  # a Gloo transport has its own
            assert not said or "was destroyed: make a new ContextParallel" in said
    except AssertionError:
        some.kill()
        raise


def kept_by_hand(here: Here) -> bool:
    group = dist.new_group(list(range(here.world_size)))
    dist.barrier(group)  # a rank that destroys it sooner breaks the others' connections
    gone = weakref.ref(group)
    kept = [group]
    del group
    dist.destroy_process_group(gone())
    return gone() is kept[0]


def test_the_test_sees_what_is_kept(ranks: RankPools) -> None:
    """A mutant of the above: who holds the group itself."""
    with ranks.expendable(2) as some:
        assert all(some(kept_by_hand))


def held_by_the_user(here: Here) -> list[str]:
    """A group that is destroyed, but that somebody else still holds; and a new one in its place."""
    group = dist.new_group(list(range(here.world_size)))
    cp = ContextParallel(group, transport="shm", timeout_seconds=PEER_SECONDS)
    calls(cp)
    dist.destroy_process_group(group)
    said = [said_after([cp])]
    with pytest.raises(ConfigurationError) as caught:
        ContextParallel(group)
    said.append(str(caught.value))
    calls(ContextParallel(dist.new_group(list(range(here.world_size))), timeout_seconds=PEER_SECONDS))
    return said


def test_what_torch_has_destroyed_cannot_be_used(ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        for said in some(held_by_the_user):
            assert all("was destroyed" in each for each in said), said


def equal(here: Here) -> tuple[bool, bool, int]:
    world, other = dist.group.WORLD, dist.new_group(list(range(here.world_size)))
    assert world is not None
    one, two = HeldGroup(world), HeldGroup(other)
    return one == HeldGroup(world), one == two, len({one, HeldGroup(world), two})


def test_held_groups_are_equal_by_the_group(ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        assert some(equal) == [(True, False, 2)] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_ends_well() -> None:
    """The ordinary one, left open, runs below."""
    for _ in range(2 if FULL_GRID else 1):
        end_well(["after a refusal"], None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_late_thread_is_waited_for(tmp_path: Path) -> None:
    """One that frees a collective's tensors 20 ms late, as it may where cores are few: kept groups abort each time."""
    first = exit_ranks.held_up(tmp_path)
    if first is None:
        pytest.skip("no C compiler")
    end_well(["left open", "closed"] if FULL_GRID else ["left open"], first)


def end_well(variants: list[str], first: Path | None) -> None:
    for variant, ended in zip(variants, exit_ranks.run(variants, first), strict=True):
        assert [code for code, _ in ended] == [0] * exit_ranks.RANKS, (variant, ended)


def test_the_scripts_are_told_apart() -> None:
    assert len({made.__name__ for made in exit_ranks.VARIANTS.values()}) == len(exit_ranks.VARIANTS)
    assert tr.__name__ == "tokenring" and (exit_ranks.ROOT / "tests").samefile(Path(__file__).parents[1])
