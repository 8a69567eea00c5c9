"""What forward and backward did on recorded streams, some times over, and what of its order can be left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import TypeVar

import torch
from stream_races import CPU, Action, Recorder, Stream, only_shared, races, without_races

from tokenring.ir.schedule_data import Pass
from tokenring.runtime.call import ActiveCall
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool

ROUNDS = 3
R = TypeVar("R", bound="Rounds")
D = TypeVar("D", bound=Collection[int])


@dataclass
class Rounds:
    """What forward and backward did, some times over; `rounds`: where each lies in the log; `channels`: their
    streams' threads."""

    log: list[Action]
    threads: int
    rounds: list[range]
    channels: frozenset[int]

    @classmethod
    def of(
        cls: type[R], executors: Mapping[Pass, Executor], pool: Pool, recorder: Recorder, own: dict[str, torch.Tensor],
        current: Sequence[Stream] = (),
    ) -> R:  # fmt: skip
        """current: streams that are so in turn."""
        with recorder:
            for _, stream in zip(range(ROUNDS), cycle(current or [recorder.current]), strict=False):
                recorder.current = stream
                recorder.mark()
                kept = executors["forward"].views.new_kept(CPU)
                for executor in executors.values():
                    executor.run(ActiveCall(own, executor.views.kept_slots_in(kept)))
                    recorder.use(pool.data, "whatever else runs on the pool")
                if kept is not None:
                    recorder.use(kept, "whoever gets the memory next")
        recorder.mark()
        log = only_shared(recorder.log)
        marks = [at for at, action in enumerate(log) if action.what == "mark"]
        channels = frozenset(each.thread for each in pool.streams._of_channel.values()) if pool.streams else frozenset()
        return cls(log, recorder.threads, [range(a, b) for a, b in pairwise(marks)], channels)

    def found(self, drop: Collection[int] = ()) -> list[str]:
        return races(self.log, self.threads, drop)

    def missed(self, drops: Sequence[D]) -> list[D]:
        """Those without which nothing is found."""
        return without_races(self.log, self.threads, drops)
