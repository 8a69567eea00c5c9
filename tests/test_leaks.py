"""A thousand contexts and groups, one after the other: what a process holds stays what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import shared_names
from held import Held, held
from ranks import PEER_SECONDS, Here, RankPools

from tokenring import ContextParallel, attention

WARM_UP = 50
SPARE_MB = 3.0  # less than a page for each of a thousand, the least that a mapping can leave
SPARE_MAPS = 8  # malloc cuts and joins its arenas


def live(name: str, group: dist.ProcessGroup | None, close: bool) -> None:
    """A context from its birth to its end, with a call in between."""
    cp = ContextParallel(group, schedule="ring", transport=name, timeout_seconds=PEER_SECONDS)
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
@pytest.mark.parametrize(
    ("name", "count", "close", "new_groups"),
    [
        ("shm", 1000, True, False),
        ("shm", 100, False, False),
        ("shm", 100, True, True),
        ("gloo", 200, True, False),
        ("gloo", 60, False, False),
        ("gloo", 60, True, True),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_nothing_grows(name: str, count: int, close: bool, new_groups: bool, ranks: RankPools) -> None:
    check(ranks, name, count, close, new_groups)


def check(ranks: RankPools, name: str, count: int, close: bool, new_groups: bool) -> list[str]:
    """Gives what each rank held, to be shown. ci/leaks.py runs more of it."""
    with ranks.expendable(2) as some:
        found = some.within(500.0, many, name, count, close, new_groups)
        assert not shared_names() or not Path("/dev/shm").exists()
    texts = []
    for rank, (before, after, collected, keys) in enumerate(found):
        texts.append(f"rank {rank}: before {before}; after {collected}; {keys} keys more in the store")
        assert not (grown := collected.growth(before, SPARE_MB, SPARE_MAPS)), grown
        assert not (waits := after.growth(collected, SPARE_MB, SPARE_MAPS)), f"garbage holds {waits}"
        assert new_groups or keys == 0, texts[-1]  # torch's own groups leave keys behind
    return texts
