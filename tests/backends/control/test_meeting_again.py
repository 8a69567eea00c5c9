"""After a meeting that failed, because a rank was late or did not come, the ranks of the same group meet again."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machines import APART, transport_name
from ranks import Here, RankPools

from tokenring import ContextParallel, PeerLost, attention
from tokenring.backends.control import store_gather as meetings
from tokenring.backends.control.store_gather import StoreGather

SECONDS = 1.0  # of a wait in vain
LATE = 1  # the rank that is late


def works(name: str, group: Any = None) -> bool:
    """Whether a new context gives the right result, for a group of one mind."""
    x = torch.ones(1, 12, 2, 16)
    with transport_name(name) as known, ContextParallel(group, transport=known, timeout_seconds=60.0) as cp:
        return bool(torch.allclose(attention(x, x, x, cp), x))


def in_vain(name: str) -> str:
    with transport_name(name) as known, pytest.raises(PeerLost) as caught:
        _ = ContextParallel(transport=known, timeout_seconds=SECONDS).transport
    assert caught.value.rank == (LATE if dist.get_rank() != LATE else 0)
    return str(caught.value)


def rank_stays_away(here: Here, name: str, times: int) -> tuple[str, list[bool]]:
    """One rank makes no context where all others do, so many times; then all make one, twice."""
    said = "" if here.rank == LATE else [in_vain(name) for _ in range(times)][-1]
    dist.barrier()
    return said, [works(name), works(name)]


def rank_comes_late(here: Here, name: str) -> tuple[str, list[bool]]:
    """One rank makes it when the others have given up."""
    if here.rank == LATE:
        dist.barrier()
    said = in_vain(name)
    if here.rank != LATE:
        dist.barrier()
    dist.barrier()
    return said, [works(name), works(name)]


def rank_meets_those_who_wait(here: Here, name: str) -> tuple[str, list[bool]]:
    """One rank makes its first context when the others already wait in their second."""
    said = "" if here.rank == LATE else in_vain(name)
    if here.rank == LATE:
        time.sleep(3 * SECONDS)
    return said, [works(name), works(name)]


@pytest.mark.parametrize("name", ["shm", "gloo", APART])
@pytest.mark.parametrize("ranks_wait", [2, 3])
def test_the_next_one_works(ranks: RankPools, ranks_wait: int, name: str) -> None:
    with ranks.expendable(ranks_wait) as some:
        for said, worked in some(rank_stays_away, name, 2 if name == "shm" else 1):
            assert worked == [True, True]
            assert not said or "The group can be used further: the ranks meet anew when all of them make" in said


@pytest.mark.parametrize("play", [rank_comes_late, rank_meets_those_who_wait])
def test_it_works_for_a_late_rank_too(ranks: RankPools, play: Any) -> None:
    with ranks.expendable(3) as some:
        for _, worked in some(play, "shm"):
            assert worked == [True, True]


def hears_that_it_is_over(here: Here) -> str:
    """Two wait for a third, one of them for an hour: it hears that the other has given up."""
    group = dist.new_group(list(range(here.world_size)))
    if here.rank == LATE:
        return ""
    with pytest.raises(PeerLost) as caught:
        StoreGather(group, SECONDS if here.rank == 0 else 3600.0).gather("names", "me")
    assert caught.value.rank == LATE
    return str(caught.value)


def test_who_still_waits_hears_that_it_is_over(ranks: RankPools) -> None:
    with ranks.expendable(3) as some:
        said = some(hears_that_it_is_over)
    assert f"did not come within {SECONDS:g} s" in said[0]
    assert "rank 1 of 3 did not come in time, or gave up waiting," in said[2]


class Counting:
    """A store that counts what one rank asks of it."""

    def __init__(self, store: Any) -> None:
        self._store, self.asked = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Any) -> Any:
            self.asked[name] += 1
            return getattr(self._store, name)(*given)

        return ask


def test_requests_of_a_rank_do_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process answers all of them; only the last rank's, which deletes, grow."""

    def asked(ranks: int) -> list[Counter[str]]:
        store = dist.HashStore()  # type: ignore[attr-defined]

        class Seen:
            def __init__(self, rank: int) -> None:
                self.rank, self.world_size = rank, ranks

            def store(self) -> Any:
                return store

        monkeypatch.setattr(meetings, "held", Seen)
        meeting = [StoreGather(rank, 20.0) for rank in range(ranks)]  # type: ignore[arg-type]
        stores = [Counting(each.store) for each in meeting]
        for each, counting in zip(meeting, stores, strict=True):
            each.store = counting  # type: ignore[assignment]
        with ThreadPoolExecutor(ranks) as pool:
            heard = list(pool.map(lambda each: each.gather("names", f"rank {each.rank}"), meeting))
        assert heard == [[f"rank {rank}" for rank in range(ranks)]] * ranks
        return [each.asked for each in stores]

    usual = Counter(set=1, add=2, wait=1, get=1, multi_get=1)
    last = Counter(compare_set=1, delete_key=24 + 3)  # of who comes last, and of who has heard of all last
    for each in asked(24):
        assert usual <= each <= usual + last


@pytest.mark.parametrize("late", [(), (0,), (6,), (2, 3), (0, 1, 2, 3, 4, 5, 6)])
def test_who_is_late_is_found_by_halves(late: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(meetings, "held", lambda rank: SimpleNamespace(rank=rank, world_size=7, store=lambda: store))
    meeting = StoreGather(0, 1.0)  # type: ignore[arg-type]
    keys = [f"key {rank}" for rank in range(7)]
    for rank in set(range(7)) - set(late):
        meeting.store.set(keys[rank], "")
    assert meeting._late(keys, 0) == list(late)


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All who wait in vain begin one new round together; texts of the old one are not read in it."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]

    class Seen:
        def __init__(self, rank: int) -> None:
            self.rank, self.world_size = rank, 3

        def store(self) -> Any:
            return store

    monkeypatch.setattr(meetings, "held", Seen)
    early = [StoreGather(rank, 0.1) for rank in (0, 2)]  # type: ignore[arg-type]
    for each in early:
        with pytest.raises(PeerLost):
            each.gather("names", "old")
    later = [StoreGather(rank, 0.1) for rank in (0, 1, 2)]  # type: ignore[arg-type]
    assert {each._round for each in early} == {0} and {each._round for each in later} == {1}
    with pytest.raises(PeerLost) as caught:
        later[1].gather("names", "new")
    assert caught.value.rank == 0
    with pytest.raises(PeerLost, match="rank 1 of 3 did not come in time, or gave up waiting"):
        later[0].gather("names", "new")  # of the same end, by rank 1: it is the late one
    assert [store.get(f"tokenring/{each}.1/gathering 1/end") for each in (0, 1)] == [b"[0, [1, 2]]", b"[1, [0, 2]]"]
