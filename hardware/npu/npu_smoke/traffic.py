"""Messages as a job has them: many at once in the transport's four lanes, alone and beside other libraries' groups.

A message that is stuck cannot be called back: a task that sees that says so, and its ranks end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from npu_smoke.here import Here
from npu_smoke.links import in_one_order
from tokenring.ir.schedule_data import PARTIALS, REQUESTS

CHANNELS = (REQUESTS, PARTIALS)
DEEP = 4  # messages of a pair on a channel that are under way at once
LATE_SECONDS = 0.5  # of half the ranks: until then the others' receives stand posted
STUCK_SECONDS = 30.0
PREPARE_SECONDS = 120.0
SMALL_BYTES = 64 << 10
Lane = tuple[int, int, str]  # from, to, channel


def _left_out(here: Here) -> dict[str, Any] | None:
    if here.backend != "hccl" or here.ranks < 2:
        return {"left out": "one rank has no peer" if here.ranks < 2 else "a matter of HCCL's communicators"}
    return None


# ---------- many at once


def receives(here: Here) -> dict[str, Any]:
    """All ranks to all, some messages deep in each of four lanes, in the one order; half of the ranks come late."""
    if reason := _left_out(here):
        return reason
    names = [lane_of(*each) for each in product((0, 1), (1, 0), CHANNELS) if each[0] != each[1]]
    here.warm_up(names)
    order = [(src, dst, channel) for _ in range(DEEP) for src, dst in in_one_order(here.ranks) for channel in CHANNELS]
    buffers = _buffers(here, order, SMALL_BYTES if not here.emulated else 64)
    here.device.synchronize()
    here.meet()
    if here.rank >= here.ranks // 2:
        time.sleep(LATE_SECONDS)
    began = time.perf_counter()
    works: list[Any] = []

    def post() -> None:
        for (src, dst, channel), data in zip(order, buffers, strict=True):
            if data is not None:
                peer = dst if here.rank == src else src
                works.append(here.message(data, peer, here.rank == src, lane_of(src, dst, channel)))

    stuck = any_rank(here, not _goes(here, post, works))
    seconds = here.slowest(time.perf_counter() - began)
    found = {"messages": len(works), "communicators": len(names) * (here.ranks - 1), "seconds": seconds,
             "device": here.device.name, **_outcome(here, stuck, order, buffers)}  # fmt: skip
    return found


def retried(here: Here) -> dict[str, Any]:
    """The same, in processes that have HCCL's retry on."""
    return receives(here)


def lane_of(src: int, dst: int, channel: str) -> str:
    """As the transport calls its groups."""
    return f"{channel} {'up' if src < dst else 'down'}"


# ---------- beside others


def lanes(here: Here) -> dict[str, Any]:
    """The transport itself, all ranks to all: alone, and beside other groups' collectives and a pipeline's receive."""
    if reason := _left_out(here):
        return reason
    order = [(src, dst, channel) for src, dst in in_one_order(here.ranks) for channel in CHANNELS]
    made = _transport(here, "lanes")
    made.prepare(order, here.place)
    here.warm_up(["pipeline"], [(rank, rank + 1) for rank in range(here.ranks - 1)])
    size = max(1, here.sizes.message_bytes // here.ranks)
    here.say("alone")
    buffers = _buffers(here, order, size)
    alone = here.timed(lambda: _wait_all(_exchange(here, made, order, buffers)))
    here.say("beside others")
    buffers = _buffers(here, order, size)
    others = Others(here)
    works: list[Any] = []
    began = time.perf_counter()

    def post() -> None:
        with here.device.on(here.device.new_stream()):
            works.extend(others.before())
        works.extend(_exchange(here, made, order, buffers))
        with here.device.on(here.device.new_stream()):
            works.extend(others.behind())

    stuck = any_rank(here, not _goes(here, post, works))
    seconds = here.slowest(time.perf_counter() - began)
    found = {"alone": alone, "beside": seconds, "bytes": size, **_outcome(here, stuck, order, buffers)}
    if not stuck:
        found["wrong"] += sum_of(here, others.wrong())
        made.close()
    return found


class Others:
    """What tensor, data and pipeline parallelism have under way: all-reduces, and a receive long before its send."""

    def __init__(self, here: Here) -> None:
        self._here, self._group = here, here.group("others")
        dist.all_reduce(torch.ones(1, device=here.place), group=self._group)  # their communicator is no matter here
        self._sums = [torch.ones(64, device=here.place) for _ in range(2)]
        self._out, self._into = here.buffer(256).fill_(1 + here.rank), here.buffer(256)

    def before(self) -> list[Any]:
        """The receive from the rank before, and an all-reduce."""
        works = [] if self._here.rank == 0 else [self._here.message(self._into, self._here.rank - 1, False, "pipeline")]
        return [*works, dist.all_reduce(self._sums[0], group=self._group, async_op=True)]

    def behind(self) -> list[Any]:
        """Another all-reduce, and the send to the next rank."""
        works = [dist.all_reduce(self._sums[1], group=self._group, async_op=True)]
        if self._here.rank + 1 < self._here.ranks:
            works.append(self._here.message(self._out, self._here.rank + 1, True, "pipeline"))
        return works

    def wrong(self) -> int:
        """How many of the three are not what they should be."""
        ends = [(each, self._here.ranks) for each in self._sums]
        ends += [(self._into, self._here.rank)] if self._here.rank else []
        return sum(bool((each.cpu() != wanted).any()) for each, wanted in ends)


# ---------- a whole preparation


def prepared(here: Here) -> dict[str, Any]:
    """A transport with all the communicators that any schedule needs: seconds, memory, and how much is given back."""
    if reason := _left_out(here):
        return reason
    links = [(src, dst, channel) for src, dst in in_one_order(here.ranks) for channel in CHANNELS]
    here.device.synchronize()
    here.meet()
    free = [here.device.memory().free_bytes]
    began = time.perf_counter()
    made = _transport(here, "prepared")
    made.prepare(links, here.place)
    here.device.synchronize()
    seconds = here.slowest(time.perf_counter() - began)
    free.append(here.device.memory().free_bytes)
    count = 4 * (here.ranks - 1)  # a channel has one for each direction
    assumed = count * made.target.connection_bytes
    began = time.perf_counter()
    made.close()
    closing = here.slowest(time.perf_counter() - began)
    free.append(here.device.memory().free_bytes)
    taken, back = (None, None) if None in free else (free[0] - free[1], free[2] - free[1])  # type: ignore[operator]
    return {"communicators": count, "seconds": seconds, "closing seconds": closing, "assumed bytes": assumed,
            "bytes": taken, "given back": back}  # fmt: skip


# ---------- what they share


def _transport(here: Here, group: str) -> Any:
    from tokenring.backends.registry import make_transport

    return make_transport("hccl", here.group(group), PREPARE_SECONDS)


def _buffers(here: Here, order: Sequence[Lane], size: int) -> list[torch.Tensor | None]:
    """One for each message of this rank: what it sends has a number of its own in every byte."""
    made: list[torch.Tensor | None] = []
    for number, (src, dst, _) in enumerate(order):
        mine = here.buffer(size) if here.rank in (src, dst) else None
        made.append(mine.fill_(_mark(number)) if mine is not None and here.rank == src else mine)
    return made


def _mark(number: int) -> int:
    return number % 251 + 1


def _exchange(here: Here, made: Any, order: Sequence[Lane], buffers: Sequence[torch.Tensor | None]) -> list[Any]:
    works = []
    for (src, dst, channel), data in zip(order, buffers, strict=True):
        if data is not None:
            label = f"{src}>{dst}"
            sends = here.rank == src
            works.append(made.send(data, dst, channel, label) if sends else made.recv(data, src, channel, label))
    return works


def _wait_all(works: Sequence[Any]) -> None:
    for each in works:
        each.wait()


def _goes(here: Here, post: Callable[[], None], works: list[Any]) -> bool:
    """Post, and look whether all is there in time: never wait for the device, which may have no end."""
    try:
        post()
        _wait_all(works)
    except Exception as error:
        here.say(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return False
    event: Any = here.device.new_event()
    event.record(here.device.current_stream())
    deadline = time.monotonic() + STUCK_SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def any_rank(here: Here, flag: bool) -> bool:
    """By way of the CPU, which is never stuck."""
    return sum_of(here, int(flag)) > 0


def sum_of(here: Here, count: int) -> int:
    """Over all ranks, by way of the CPU, which is never stuck."""
    found = torch.tensor(count, dtype=torch.int64)
    dist.all_reduce(found)
    return int(found)


def _outcome(
    here: Here, stuck: bool, order: Sequence[Lane], buffers: Sequence[torch.Tensor | None]
) -> dict[str, Any]:
    """Whether messages are stuck, how many are wrong on all ranks; and that these ranks must end, if some are."""
    if stuck:
        return {"stuck": True, "wrong": None, "ends": True}
    mine = zip(enumerate(order), buffers, strict=True)
    wrong = sum(bool((data.cpu() != _mark(number)).any())
                for (number, (_, dst, _)), data in mine if data is not None and here.rank == dst)  # fmt: skip
    return {"stuck": False, "wrong": sum_of(here, wrong)}
