"""Programs with collectives on a device with streams: every use of shared memory has its order, and no wait is idle.

As test_streams.py for messages. A collective is on its way from its post, on the stream of its channel, to its wait,
on the stream that computes: the emulated HCCL has one order for all streams, and could not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from stream_races import CPU, Access, Action, Recorder
from stream_rounds import Rounds

from tokenring import Full, Workload
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.lower import lower
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool
from tokenring.runtime.streams import Streams
from tokenring.schedule.names import named_schedule
from tokenring.sequence.layout import make_layout

TOKENS, HEADS, DIM = 8, 3, 4  # at each rank
Tensors = Mapping[int, torch.Tensor]


@dataclass
class OnItsWay:
    """A collective."""

    recorder: Collecting
    thread: int

    def wait(self) -> None:
        self.recorder.log.append(Action("join", self.recorder.current.thread, self.thread))


class Collecting(Recorder):  # type: ignore[no-untyped-call]
    """Its exchanges are collectives, whose posts do not wait for each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.target = replace(self.target, early_receives=False, collectives=True)

    def all_to_all(self, sends: Tensors, recvs: Tensors, ranks: tuple[int, ...], label: str) -> OnItsWay:
        reads = [self._access(data, False) for data in sends.values()]
        return self._collective(label, *reads, *(self._access(data, True) for data in recvs.values()))

    def all_gather(self, data: torch.Tensor, recvs: Tensors, ranks: tuple[int, ...], label: str) -> OnItsWay:
        """What a rank gives may be written, as its own part of all."""
        return self._collective(label, *(self._access(each, True) for each in (data, *recvs.values())))

    def _collective(self, label: str, *accesses: Access) -> OnItsWay:
        thread = self._new_thread()
        self.log.append(Action("fork", thread, self.current.thread))
        self.log.append(Action("use", thread, accesses=accesses, label=label))
        return OnItsWay(self, thread)


class Recorded(Rounds):
    """As recorded of collectives."""

    def mutants(self) -> list[set[int]]:
        """What may be left out of the second round: a wait for a collective, or all events that one post waits for.

        A collective begins with the last of its messages' posts, whose event is behind those of the others.
        """
        found, events = [], dict[int, set[int]]()
        for at in self.rounds[1]:
            action = self.log[at]
            if action.what == "join" and action.other not in self.channels:
                found.append({at})
            elif action.what == "wait":
                events.setdefault(action.thread, set()).add(at)
            elif action.what == "fork" and action.other in events:
                found.append(events.pop(action.other))
        return found


def record(name: str, ranks: int, rank: int) -> Recorded:
    recorder = Collecting(rank, ranks)
    pool = Pool(CPU)
    pool.streams = Streams(recorder)  # type: ignore[arg-type]
    size = Workload(1, TOKENS * ranks, TOKENS * ranks, HEADS, HEADS, DIM, torch.float32)
    layout, kernel = make_layout("zigzag", ranks, size.q_length), CpuFlash()
    schedule = named_schedule(name, size, layout, layout, Full(), None)
    executors = {}
    for direction in (*PASSES, *PASSES):  # again, on the memory that the pool has grown to
        program = lower(schedule, rank, direction, size, recorder.target, kernel.supports_patch)
        assert program.collectives
        executors[direction] = Executor(schedule, size, program, pool, recorder, kernel, 0.5)  # type: ignore[arg-type]
    own: dict[str, Any] = {part: torch.zeros(1, TOKENS, HEADS, DIM) for part in ("q", "k", "v", "out", "dout")}
    own |= {part: torch.zeros(1, HEADS, TOKENS) for part in ("lse", "delta")}
    return Recorded.of(executors, pool, recorder, own)


SCHEDULES = (("direct-q", 3), ("all-gather-kv", 4), ("ulysses", 3))


@pytest.mark.parametrize(("name", "ranks"), SCHEDULES)
def test_everything_has_its_order(name: str, ranks: int) -> None:
    labels = ""
    for rank in range(ranks):
        recorded = record(name, ranks, rank)
        assert recorded.found() == []
        labels += "; ".join(each.label for each in recorded.log)
    assert ", all-to-all of" in labels and (", all-gather of" in labels) == (name != "ulysses")


@pytest.mark.parametrize(("name", "ranks"), SCHEDULES)
def test_no_wait_is_idle(name: str, ranks: int) -> None:
    for rank in (0, ranks - 1):
        recorded = record(name, ranks, rank)
        mutants = recorded.mutants()
        idle = [[recorded.log[at] for at in each] for each in recorded.missed(mutants)]
        assert len(mutants) > 4 and not idle, f"{len(idle)} of {len(mutants)} are not found out: {idle[:5]}"
