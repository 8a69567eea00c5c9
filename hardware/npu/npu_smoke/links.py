"""What links carry: one pair both ways, all peers at once, messages against batches against collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from npu_smoke.here import Here, pair_buffer_bytes, wait_all

DELAY_SECONDS = 0.5
STAGING_ROUNDS = 8
Post = Callable[[], list[Any]]  # posts, and returns the works


def pair(here: Here) -> dict[str, Any]:
    """Ranks 0 and 1: one way, both ways in one group, both ways in a group for each direction."""
    if here.ranks < 2:
        return {"left out": "one rank has no peer"}
    size = here.sizes.message_bytes
    here.warm_up(["up", "down"], [(0, 1)])
    out, into = here.buffer(size), here.buffer(size)
    mine, peer = here.rank < 2, 1 - here.rank

    def one_way() -> None:
        here.message(out if here.rank == 0 else into, peer, here.rank == 0, "up").wait()

    def both(there: str, back: str) -> None:
        """Message by message in the order of both ends: up first."""
        first = here.message(out if here.rank == 0 else into, peer, here.rank == 0, there)
        second = here.message(into if here.rank == 0 else out, peer, here.rank == 1, back)
        wait_all([first, second])

    found: dict[str, Any] = {"bytes": size, "device": here.device.name}
    calls = {
        "one way": one_way,
        "both, one group": lambda: both("up", "up"),
        "both, two groups": lambda: both("up", "down"),
    }
    for name, call in calls.items():
        here.say(name)
        seconds = here.timed(call if mine else None)
        found[name] = {"seconds": seconds, "gbs": size / seconds / 1e9}
    return found


def peers(here: Here) -> dict[str, Any]:
    """Rank 0 to one peer, and to all at once."""
    if here.ranks < 2:
        return {"left out": "one rank has no peer"}
    size = here.sizes.message_bytes
    here.warm_up(["up"], [(0, to) for to in range(1, here.ranks)])
    buffers = [here.buffer(size) for _ in range(here.ranks - 1)]

    def to(last: int) -> None:
        if here.rank == 0:
            wait_all([here.message(buffers[to - 1], to, True, "up") for to in range(1, last + 1)])
        elif here.rank <= last:
            here.message(buffers[0], 0, False, "up").wait()

    found: dict[str, Any] = {"bytes": size, "peers": here.ranks - 1}
    for name, last in (("to one", 1), ("to all", here.ranks - 1)):
        seconds = here.timed(lambda last=last: to(last))  # type: ignore[misc]
        found[name] = {"seconds": seconds, "gbs": size * last / seconds / 1e9}
    return found


def ways(here: Here) -> dict[str, Any]:
    """Every rank to every other one by messages, in a batch, by collectives: alone, and while attention runs."""
    if here.ranks < 2:
        return {"left out": "one rank has no peer"}
    exchanges, found = _exchanges(here)
    attend = here.attention()
    alone, stretch = {}, {}
    for name, (post, sent) in exchanges.items():
        here.say(name)
        seconds = here.timed(lambda post=post: wait_all(post()))  # type: ignore[misc]
        alone[name] = {"seconds": seconds, "gbs": sent / seconds / 1e9}
        calls = max(1, round(seconds / here.timed(attend)))
        kernels = here.timed(lambda calls=calls: [attend() for _ in range(calls)])  # type: ignore[misc]
        together = here.timed(lambda post=post, calls=calls: _under(here, post, attend, calls))  # type: ignore[misc]
        stretch[name] = together / max(seconds, kernels)
    return {"alone": alone, "stretch": stretch, **found}


def _under(here: Here, post: Post, attend: Callable[[], object], calls: int) -> None:
    """Transfers on a stream of their own, so that they do not come after what is queued here."""
    side = here.device.new_stream()
    with here.device.on(side):
        works = post()
    for _ in range(calls):
        attend()
    with here.device.on(side):
        wait_all(works)


def _exchanges(here: Here) -> tuple[dict[str, tuple[Post, int]], dict[str, Any]]:
    """By name: how to post it, and the bytes that a rank sends."""
    others = [rank for rank in range(here.ranks) if rank != here.rank]
    size = max(1, here.sizes.message_bytes // len(others))
    here.warm_up(["up", "down"])
    out, into = {to: here.buffer(size) for to in others}, {by: here.buffer(size) for by in others}
    whole_out, whole_in, gathered = here.buffer(size * here.ranks), here.buffer(size * here.ranks), here.buffer(size)
    batch, collective = here.group("batch"), here.group("collective")
    counted: dict[str, Any] = {"operations": 2 * len(others), "works": None, "bytes": size}

    def messages() -> list[Any]:
        """In one order of all ranks: communicators may share a stream, where sends would hold up receives."""
        works = []
        for src, dst in in_one_order(here.ranks):
            if here.rank in (src, dst):
                sends, lane = here.rank == src, "up" if src < dst else "down"
                buffer, peer = (out[dst], dst) if sends else (into[src], src)
                works.append(here.message(buffer, peer, sends, lane))
        return works

    def batched() -> list[Any]:
        operations = []
        for peer in others:  # at both ends the lower rank's message comes first, should order be the match here too
            ends = [dist.P2POp(dist.isend, out[peer], peer, batch), dist.P2POp(dist.irecv, into[peer], peer, batch)]
            operations += ends if here.rank < peer else ends[::-1]
        works = list(dist.batch_isend_irecv(operations))
        counted["works"] = len(works)
        return works

    def all_to_all() -> list[Any]:
        if here.emulated:  # which has the forms of lists alone
            lists = list(whole_in.chunk(here.ranks)), list(whole_out.chunk(here.ranks))
            return [dist.all_to_all(*lists, group=collective, async_op=True)]
        return [dist.all_to_all_single(whole_in, whole_out, group=collective, async_op=True)]

    def all_gather() -> list[Any]:
        if here.emulated:
            return [dist.all_gather(list(whole_in.chunk(here.ranks)), gathered, group=collective, async_op=True)]
        return [dist.all_gather_into_tensor(whole_in, gathered, group=collective, async_op=True)]

    sent = size * len(others)
    exchanges = {"messages": (messages, sent), "batch": (batched, sent), "all-to-all": (all_to_all, sent),
                 "all-gather": (all_gather, sent)}  # fmt: skip
    return exchanges, counted


def staging(here: Here) -> dict[str, Any]:
    """All-to-alls of lists, posted on one stream and waited for on another, as the executor does.

    torch_npu copies lists through one buffer for all that is given and one for all that is taken. The memory that
    is asked for meanwhile, on the stream of the post, must not be theirs.
    """
    if here.ranks < 2 or here.backend != "hccl":
        return {"left out": "one rank has no peer" if here.ranks < 2 else "a matter of HCCL's all-to-all of lists"}
    size, group, side = here.sizes.message_bytes // here.ranks, here.group("staging"), here.device.new_stream()
    given = [here.buffer(size).fill_(1 + here.rank) for _ in range(here.ranks)]
    wrong = 0
    for _ in range(STAGING_ROUNDS):
        taken = [here.buffer(size) for _ in range(here.ranks)]
        here.device.synchronize()
        here.meet()
        with here.device.on(side):
            work = dist.all_to_all(taken, given, group=group, async_op=True)
            others = [here.buffer(size * here.ranks).fill_(255) for _ in range(STAGING_ROUNDS)]
        work.wait()
        seen = torch.stack([(each != 1 + rank).any() for rank, each in enumerate(taken)])
        wrong += int(seen.any())
        del others
    most = torch.tensor(wrong, dtype=torch.int64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"wrong": int(most), "rounds": STAGING_ROUNDS}


def in_one_order(ranks: int) -> list[tuple[int, int]]:
    """(source, destination) of all messages of an exchange, round by round: in each, every rank has one peer."""
    from tokenring.backends.transports.hccl import warm_up_order

    pairs = [(low, high, "") for low in range(ranks) for high in range(low + 1, ranks)]
    return [ends for low, high, _ in warm_up_order(pairs, ranks) for ends in ((low, high), (high, low))]


def wait(here: Here) -> dict[str, Any]:
    """How long the host of rank 1 is in wait for a message that rank 0 posts late."""
    if here.ranks < 2:
        return {"left out": "one rank has no peer"}
    here.warm_up(["up"], [(0, 1)])
    data, seconds = here.buffer(1024), 0.0
    here.device.synchronize()
    here.meet()
    if here.rank == 0:
        time.sleep(DELAY_SECONDS)
        here.message(data, 1, True, "up").wait()
    elif here.rank == 1:
        work = here.message(data, 0, False, "up")
        began = time.perf_counter()
        work.wait()
        seconds = time.perf_counter() - began
    here.device.synchronize()
    return {"seconds in wait": here.slowest(seconds), "delay": DELAY_SECONDS}


def memory(here: Here) -> dict[str, Any]:
    """What the first message between two ranks in a new group takes, in memory and in time."""
    if here.ranks < 2:
        return {"left out": "one rank has no peer"}
    here.group("memory")
    data = here.buffer(1)
    here.device.synchronize()
    here.meet()
    free = here.device.memory().free_bytes
    began = time.perf_counter()
    if here.rank < 2:
        here.message(data, 1 - here.rank, here.rank == 0, "memory").wait()
    here.device.synchronize()
    seconds = here.slowest(time.perf_counter() - began)
    left = here.device.memory().free_bytes
    taken = 0 if free is None or left is None or here.rank > 1 else free - left
    most = torch.tensor(taken, dtype=torch.int64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"bytes": int(most), "assumed bytes": pair_buffer_bytes(), "first contact seconds": seconds}
