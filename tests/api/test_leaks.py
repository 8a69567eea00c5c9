"""Hundreds of contexts and groups, one after the other: what a process holds stays what it was.

Of what is shared by all ranks a thousand with TOKENRING_FULL_GRID=1.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from faults import lasting_names
from held import Held, held
from machines import APART, transport_name
from patience import patient
from ranks import PEER_SECONDS, Here, RankPools
from sampling import FULL_GRID

from tokenring import ContextParallel, attention

WARM_UP = 30
SPARE_MB = 3.0  # less than a page for each of a thousand, the least that a mapping can leave
SPARE_MAPS = 40  # malloc has up to eight arenas for each core, of two mappings; no count here is so small


def live(name: str, group: dist.ProcessGroup | None, close: bool) -> None:
    """A context from its birth to its end, with a call in between."""
    with transport_name(name) as known:
        cp = ContextParallel(group, schedule="ring", transport=known, timeout_seconds=patient(PEER_SECONDS))
        x = torch.ones(1, 8, 2, 16, requires_grad=True)
        out = attention(x, x, x, cp)
    torch.autograd.backward(out.sum())
    if close:
        cp.close()


def many(here: Here, name: str, count: int, close: bool, new_groups: bool) -> tuple[Held, Held, Held, int]:
    """What is held after the warm-up, at the end, and when garbage is gone; how many keys the store has more.

    Nothing may wait for the garbage collector: it does not know that a few bytes hold threads and connections.
    """
    for number in range(WARM_UP + count):
        if number == WARM_UP:
            before, keys = held(), _keys()
        group = dist.new_group(list(range(here.world_size))) if new_groups else None
        live(name, group, close)
        if group is not None:
            dist.destroy_process_group(group)
    after = held(collect=False)
    return before, after, held(), _keys() - keys


def _keys() -> int:
    assert dist.group.WORLD is not None
    dist.barrier()
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    count = int(store.num_keys())
    dist.barrier()  # nobody makes more before all have counted
    return count


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "count", "close", "new_groups"),
    [
        pytest.param("shm", 1000 if FULL_GRID else 100, True, False, id="shm, closed"),
        pytest.param("shm", 60, False, False, id="shm, dropped"),
        pytest.param("shm", 60, True, True, id="shm, new groups"),
        pytest.param("gloo", 200 if FULL_GRID else 50, True, False, id="gloo, closed"),
        pytest.param("gloo", 40, False, False, id="gloo, dropped"),
        pytest.param("gloo", 40, True, True, id="gloo, new groups"),
        pytest.param(APART, 40, True, False, id=f"{APART}, closed"),
        pytest.param(APART, 40, False, False, id=f"{APART}, dropped"),
    ],
)
def test_nothing_grows(name: str, count: int, close: bool, new_groups: bool, ranks: RankPools) -> None:
    check(ranks, name, count, close, new_groups)


def check(ranks: RankPools, name: str, count: int, close: bool, new_groups: bool) -> list[str]:
    """Gives what each rank held, which benchmarks/leaks.py shows."""
    with ranks.expendable(2) as some:
        found = some.within(500.0, many, name, count, close, new_groups)
        assert not lasting_names()
    texts = []
    for rank, (before, after, collected, keys) in enumerate(found):
        texts.append(f"rank {rank}: before {before}; after {collected}; {keys} keys more in the store")
        assert not (grown := collected.growth(before, SPARE_MB, SPARE_MAPS)), grown
        assert not (waits := after.growth(collected, SPARE_MB, SPARE_MAPS)), f"garbage holds {waits}"
        assert new_groups or keys == 0, texts[-1]  # torch's own groups leave keys behind
    return texts
