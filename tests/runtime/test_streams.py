"""The executor on a device with streams: every use of shared memory has its order, and no record or wait is idle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stream_races import CPU, GroupRecorder, Recorder, behind_groups_again, orders
from stream_rounds import Rounds

from tokenring import Causal, Workload
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.lower import lower
from tokenring.lowering.program import OWN, Attend, Instruction, Pack, Recv, Send, Span, Wait
from tokenring.lowering.target import Target
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool
from tokenring.runtime.streams import START, Streams, post_waits
from tokenring.schedule.names import named_schedule
from tokenring.sequence.layout import make_layout

TOKENS, HEADS, DIM = 8, 2, 4  # at each rank
SCHEDULES = (
    ("ring", 3), ("tokenring", 4), ("direct-kv", 3), ("direct-q", 3), ("bidirectional", 4), ("ulysses", 2),
    ("ring/keep", 3), ("tiles/2x2", 4),
)  # fmt: skip


class Recorded(Rounds):
    """As recorded of messages."""

    def mutants(self) -> list[frozenset[int]]:
        """What may be left out of the second round: a record, a wait for an event, or the waits for a message."""
        ends = self.ends()
        return [each for each in orders(self.log) if each <= set(self.rounds[1]) and not each & ends]

    def ends(self) -> set[int]:
        """The waits for channels' streams, at the ends of programs."""
        return {at for at, each in enumerate(self.log) if each.what == "join" and each.other in self.channels}


def record(
    name: str, ranks: int, rank: int, early: bool = True, one_sided: bool = False, streams: int = 1, late: bool = True,
    grouping: bool = False,
) -> Recorded:  # fmt: skip
    """Three rounds of a schedule at one rank. streams: current in turn; late=False: the executor knows of none."""
    recorder = (GroupRecorder if grouping else Recorder)(rank, ranks, one_sided)
    pool = Pool(CPU, _allocator() if one_sided else None)
    pool.streams = Streams(recorder) if late else None  # type: ignore[arg-type]
    executors = _executors(name, ranks, rank, early, pool, recorder)
    own = {part: torch.zeros(1, TOKENS, HEADS, DIM) for part in ("q", "k", "v", "out", "dout")}
    own |= {part: torch.zeros(1, HEADS, TOKENS) for part in ("lse", "delta")}
    current = [recorder.current, *(recorder.new_stream() for _ in range(streams - 1))]
    return Recorded.of(executors, pool, recorder, own, current)


def _executors(name: str, ranks: int, rank: int, early: bool, pool: Pool, moved: Any) -> dict[Pass, Executor]:
    workload = Workload(1, TOKENS * ranks, TOKENS * ranks, HEADS, HEADS, DIM, torch.float32)
    layout = make_layout("zigzag", ranks, workload.q_length)
    schedule = named_schedule(name, workload, layout, layout, Causal(), None)
    kernel: Any = CpuFlash()
    made: dict[Pass, Executor] = {}
    for direction in (*PASSES, *PASSES):  # again, on the memory that the pool has grown to
        program = lower(schedule, rank, direction, workload, Target(early_receives=early), kernel.supports_patch)
        made[direction] = Executor(schedule, workload, program, pool, moved, kernel, 0.5)
    return made


def _allocator() -> Any:
    """Memory of the pool as a one-sided transport gives it."""
    given = [0]

    def allocate(nbytes: int) -> torch.Tensor | None:
        if nbytes <= given[0]:
            return None
        given[0] = nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    return allocate


# In groups, of rank 0: mutants, those that stand right behind a second wait for a group, those that nobody misses.
# docs/compile.md says why there are some.
EXCUSED = {
    "ring": (24, 4, 4), "tokenring": (48, 4, 4), "direct-kv": (9, 0, 0), "direct-q": (12, 0, 0),
    "bidirectional": (33, 12, 8), "ulysses": (12, 0, 0), "ring/keep": (12, 0, 0), "tiles/2x2": (12, 0, 0),
}  # fmt: skip
WAYS = pytest.mark.parametrize(("early", "grouping"), [(True, False), (False, False), (False, True)])  # as there are


@WAYS
@pytest.mark.parametrize(("name", "ranks"), SCHEDULES)
def test_everything_has_its_order(name: str, ranks: int, early: bool, grouping: bool) -> None:
    for rank in range(ranks):
        assert record(name, ranks, rank, early, grouping=grouping).found() == []


@pytest.mark.parametrize(
    ("name", "ranks", "early", "grouping"),
    [
        *((*each, True, False) for each in SCHEDULES[:3]),  # no transport with streams has early receives
        *((*each, False, grouping) for each in SCHEDULES for grouping in (False, True)),
    ],
)
def test_no_record_or_wait_is_idle(name: str, ranks: int, early: bool, grouping: bool) -> None:
    """Each mutant lacks one of the second round; the rounds around it show what is overwritten or read too early."""
    for rank in (0,) if grouping else (0, ranks - 1):
        recorded = record(name, ranks, rank, early, grouping=grouping)
        mutants = recorded.mutants()
        assert len(mutants) > 4
        known = behind_groups_again(recorded.log) if grouping else set()
        missed = recorded.missed(mutants)
        idle = [[recorded.log[at] for at in each] for each in missed if not each & known]
        assert not idle, f"{len(idle)} of {len(mutants)} mutants are not found out: {idle[:5]}"
        if grouping:
            assert (len(mutants), sum(bool(each & known) for each in mutants), len(missed)) == EXCUSED[name]


def test_no_record_or_wait_is_idle_where_messages_land_elsewhere() -> None:
    """One-sided transports cannot write into kept memory."""
    recorded = record("ulysses", 2, 0, one_sided=True)
    assert recorded.found() == []
    mutants = recorded.mutants()
    assert mutants and not recorded.missed(mutants)


def test_programs_end_in_the_stream_that_they_began_in() -> None:
    """Each pass waits for its channels' streams behind everything else; a graph must (test_captured_messages)."""
    recorded = record("tokenring", 4, 0, early=False)
    for turn in recorded.rounds:
        ends = sorted(recorded.ends() & set(turn))
        assert [recorded.log[at].other for at in ends[:2]] == [recorded.log[at].other for at in ends[2:]]
        assert len(ends) == 4 and set(recorded.channels) == {recorded.log[at].other for at in ends}
        posts = [at for at in turn if recorded.log[at].what == "fork"]
        assert max(posts) < ends[-2]


def test_the_caller_may_change_streams() -> None:
    """A call waits for the one before, which ran on another stream; without that wait it is found out."""
    recorded = record("ring", 3, 0, streams=2)
    assert recorded.found() == []
    streams = {action.thread for action in recorded.log if action.what == "record"}
    between = [
        at
        for at in recorded.rounds[1]
        if recorded.log[at].what == "join" and {recorded.log[at].thread, recorded.log[at].other} == streams
    ]
    assert len(between) == 1 and recorded.found(between)


def test_posts_on_other_streams_need_the_events() -> None:
    """Posted on the stream that computes, everything is in order without any event."""
    recorded = record("tokenring", 4, 0, late=False)
    assert recorded.found() == []
    assert not any(action.what in ("record", "wait") for action in recorded.log)


# ---------- which events


def test_what_a_post_waits_for() -> None:
    one, other = Span(0, 0, 4), Span(0, 4, 8)
    program: list[Instruction] = [
        Recv(0, Span(1, 0, 4), 1, "requests", ""),  # 0: whoever used the slot in the last call
        Pack("kv", Span(OWN, 0, 4), one),  # 1
        Pack("kv", Span(OWN, 4, 8), other),  # 2
        Send(1, one, 1, "requests", ""),  # 3: after 1, not 2
        Send(2, one, 2, "requests", ""),  # 4: its stream is past 1
        Send(3, other, 2, "partials", ""),  # 5: after 2
        Attend(0, one, other, None, ()),  # type: ignore[arg-type]  # 6: reads what is sent
        Send(4, one, 2, "partials", ""),  # 7: reading needs no wait
        Wait(1),  # 8
        Wait(2),  # 9
        Wait(4),  # 10
        Recv(5, one, 1, "requests", ""),  # 11: after the waits for what was sent from there
    ]
    assert post_waits(program) == {0: START, 3: 1, 5: 2, 11: 10}
