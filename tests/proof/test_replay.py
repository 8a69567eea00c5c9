"""replay accepts what lower makes and refuses programs with one thing wrong at one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations

import pytest
import torch
from bases import NAMED, bases, make
from program_mutants import KINDS, Mutant, drop, move_up, peer, posts, wait_of
from programs import lower_all

from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.program import Fill, Merge, Program, Recv, Send
from tokenring.proof.replay import Kept, replay, replay_schedule
from tokenring.proof.visible_pairs import Pairs
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.workload import Workload

BASES = bases()
CIRCLE = r"step \d, rank \d: waits for ever in a circle, rank \d in step \d for (send|receive) .*: a deadlock"


def workload_of(schedule: Schedule) -> Workload:
    groups = schedule.head_groups
    return Workload(1, schedule.q_layout.length, schedule.kv_layout.length, groups, groups, 2, torch.bfloat16)


@cache
def programs_of(base: str, direction: Pass, early: bool) -> list[Program]:
    return lower_all(BASES[base], workload_of(BASES[base]), direction, early_receives=early)


@cache
def kept_of(base: str, direction: Pass, early: bool) -> Kept | None:
    """What a pass is given."""
    if direction == "forward":
        return None
    return replay(BASES[base], programs_of(base, "forward", early), one_queue_a_pair=not early)


@cache
def pairs_of(base: str) -> Pairs:
    return Pairs(BASES[base])


def run(base: str, programs: list[Program], one_queue: bool) -> None:
    kept = kept_of(base, programs[0].direction, not one_queue)
    replay(BASES[base], programs, one_queue_a_pair=one_queue, kept=kept, pairs=pairs_of(base))


def mutants(kind: str, base: str) -> Iterator[tuple[list[Program], bool, int, Mutant]]:
    """A few of each pass, of different ranks: some with one kind of transport, some with the other."""
    for direction in PASSES:
        for early in (True, False):
            programs = programs_of(base, direction, early)
            found = [(rank, mutant) for rank, program in enumerate(programs) for mutant in KINDS[kind](program)]
            some = {0, len(found) // 2} if early else {len(found) // 3, len(found) - 1}
            for index in sorted(some if found else ()):
                rank, mutant = found[index]
                yield [*programs[:rank], mutant.program, *programs[rank + 1 :]], early, rank, mutant


def check_refused(base: str, programs: list[Program], early: bool, rank: int, mutant: Mutant) -> None:
    direction = programs[0].direction
    with pytest.raises(ScheduleError) as caught:
        run(base, programs, not early)
    text = str(caught.value)
    parts = re.fullmatch(rf"{BASES[base].name}, {direction}: step (\d+), rank (\d+): (.*)", text)
    assert parts, text
    assert any(int(parts[1]) in program.steps for program in programs), text
    assert int(parts[2]) in (mutant.ranks or (rank,)), text
    assert re.search(mutant.says, parts[3]), text
    assert mutant.label in parts[3], text


@pytest.mark.sampled(160)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", KINDS)
def test_mutant_is_refused(kind: str, base: str) -> None:
    for programs, early, rank, mutant in mutants(kind, base):
        check_refused(base, programs, early, rank, mutant)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_applies_to_several_schemes(kind: str) -> None:
    assert len({BASES[base].name for base in BASES for _ in mutants(kind, base)}) >= 2


class TestPairOrder:
    """Both directions of a pair in one queue (`one_queue_a_pair`), or each in its own."""

    @pytest.mark.parametrize("base", BASES)
    @pytest.mark.parametrize("direction", PASSES)
    def test_strict_programs_run_on_both(self, base: str, direction: Pass) -> None:
        for one_queue in (True, False):
            run(base, programs_of(base, direction, early=False), one_queue)

    @pytest.mark.parametrize("base", BASES)
    @pytest.mark.parametrize("direction", PASSES)
    def test_early_receives_need_a_queue_for_each_direction(self, base: str, direction: Pass) -> None:
        """Wherever two ranks send to each other in one step. (A ring's never do, from three ranks on.)"""
        programs = programs_of(base, direction, early=True)
        run(base, programs, False)
        moves = {(move.step, move.src, move.dst, move.channel) for move in BASES[base].moves_in(direction)}
        cross = any((step, dst, src, channel) in moves for step, src, dst, channel in moves)
        assert cross == (BASES[base].name not in ("ring", "follow"))
        if cross:
            with pytest.raises(ScheduleError, match=CIRCLE):
                run(base, programs, True)
        else:
            run(base, programs, True)

    @pytest.mark.parametrize("base", BASES)
    def test_strict_programs_need_one_queue_a_rank_and_early_ones_more(self, base: str) -> None:
        """Where communicators share a stream; an early receive holds up sends to others there."""
        for early in (False, True):
            kept: Kept | None = None
            for direction in PASSES:
                programs = programs_of(base, direction, early)
                if not early:
                    kept = replay(BASES[base], programs, False, kept, one_queue_a_rank=True)
                elif BASES[base].moves_in(direction):
                    given = kept_of(base, direction, True)
                    with pytest.raises(ScheduleError, match=CIRCLE):
                        replay(BASES[base], programs, False, given, one_queue_a_rank=True)

    def test_two_ranks_that_both_receive_first(self) -> None:
        made = make(2, "ring+", "zigzag", "full")
        programs = lower_all(made, Workload(1, 32, 32, 1, 1, 2))
        replay(made, programs, one_queue_a_pair=False)
        says = (
            "step 1, rank 0: waits for ever in a circle, rank 0 in step 1 for receive 0 (step 0, kv1,kv2, rank 1, "
            "requests), rank 1 in step 1 for receive 0 (step 0, kv0,kv3, rank 0, requests): a deadlock"
        )
        with pytest.raises(ScheduleError, match=re.escape(f"ring, forward: {says}")):
            replay(made, programs, one_queue_a_pair=True)

    @pytest.mark.parametrize("base", [base for base in BASES if base.startswith(("direct", "Ulysses"))])
    def test_receive_before_the_send_to_the_same_peer(self, base: str) -> None:
        """What crosses in one queue passes in two."""
        programs = programs_of(base, "forward", early=False)
        swapped = []
        for program in programs:
            for (first, a), (second, b) in combinations(posts(program), 2):
                if isinstance(a, Send) and isinstance(b, Recv) and steps_and_pair(a) == steps_and_pair(b):
                    between = [post for _, post in posts(program) if a.message < post.message < b.message]
                    if all(steps_and_pair(post) != steps_and_pair(a) for post in between):
                        swapped.append(move_up(program, second, first))
        assert swapped
        for mutant in swapped[:6]:
            with_mutant = [mutant if program.rank == mutant.rank else program for program in programs]
            run(base, with_mutant, False)
            with pytest.raises(ScheduleError, match=CIRCLE):
                run(base, with_mutant, True)


def steps_and_pair(post: Recv | Send) -> tuple[str, int, str]:
    return post.label.partition(",")[0], peer(post), post.channel


@pytest.mark.parametrize("named", NAMED)
def test_programs_of_many_ranks(named: str) -> None:
    replay_schedule(make(32 if named in ("ring", "tokenring") else 16, named, "zigzag", "causal"))


# ---------- what no base schedule has


def test_dropped_fill() -> None:
    """Rows that see nothing have a result as well."""
    made = make(4, "ring+", "zigzag", "documents")
    programs = lower_all(made, workload_of(made))
    filled = [(rank, at) for rank, program in enumerate(programs) for at, each in enumerate(program.instructions)
              if isinstance(each, Fill)]  # fmt: skip
    assert filled
    for rank, at in filled:
        mutant = [drop(program, at) if program.rank == rank else program for program in programs]
        with pytest.raises(
            ScheduleError, match=rf"^ring, forward: step \d, rank {rank}: ends without a result for o\d$"
        ):
            replay(made, mutant, one_queue_a_pair=False)


class TestDeadlock:
    """The cause is named, however far away ranks wait for it."""

    def test_dropped_sends(self) -> None:
        """Rank 2 passes nothing on; rank 3 waits, rank 0 for rank 3, and rank 1 for rank 0."""
        made = make(4, "ring+", "contiguous", "full")
        programs = lower_all(made, workload_of(made))
        sends = [(at, post) for at, post in posts(programs[2]) if isinstance(post, Send)]
        places = [place for at, post in sends for place in (at, wait_of(programs[2], post))]
        programs[2] = drop(programs[2], *places)
        says = (
            "never sends step 0, kv2 to rank 3, which in step 1 waits for ever for "
            "receive 0 (step 0, kv2, rank 2, requests): a deadlock"
        )
        check_deadlock(made, programs, 2, says)

    def test_dropped_receive(self) -> None:
        """Rank 1 sends to rank 2, which has ended."""
        made = make(4, "tokenring+", "contiguous", "full")
        programs = lower_all(made, workload_of(made))
        dropped = [post for _, post in posts(programs[2]) if isinstance(post, Recv) and "o2@1" in post.label][-1]
        merged = next(at for at, each in enumerate(programs[2].instructions)
                      if isinstance(each, Merge) and each.source == dropped.span)  # fmt: skip
        at = programs[2].instructions.index(dropped)
        programs[2] = drop(programs[2], at, wait_of(programs[2], dropped), merged)
        says = (
            "never receives step 3, o2@1 from rank 1, which in step 3 waits for ever for "
            "send 11 (step 3, o2@1, rank 2, partials): a deadlock"
        )
        check_deadlock(made, programs, 2, says)

    def test_circle(self) -> None:
        """Each rank waits for what the one before it sends only when it has received, too."""
        made = make(4, "ring+", "contiguous", "full")
        programs = [receive_first(program) for program in lower_all(made, workload_of(made))]
        links = ", ".join(f"rank {r} in step 0 for receive 0 (step 0, kv{s}, rank {s}, requests)" for r, s in AROUND)
        check_deadlock(made, programs, 0, f"waits for ever in a circle, {links}: a deadlock")

    def test_circle_that_others_wait_for(self) -> None:
        """Ranks 1 and 2 both receive from each other first; rank 0 is not in the circle, but waits for rank 1."""
        made = make(4, "direct-kv", "contiguous", "full")
        programs = lower_all(made, workload_of(made), early_receives=False)
        recv = next(post for _, post in posts(programs[1]) if isinstance(post, Recv) and post.src == 2)
        first = next(at for at, post in posts(programs[1]) if isinstance(post, Send))
        programs[1] = move_up(programs[1], programs[1].instructions.index(recv), first)
        programs[1] = move_up(programs[1], wait_of(programs[1], recv), first + 1)
        says = (
            "waits for ever in a circle, rank 1 in step 0 for receive 4 (step 0, kv2, rank 2, requests), "
            "rank 2 in step 1 for receive 1 (step 0, kv1, rank 1, requests): a deadlock"
        )
        check_deadlock(made, programs, 1, says, one_queue=True)


AROUND = ((0, 3), (3, 2), (2, 1), (1, 0))  # who waits for whom


def check_deadlock(made: Schedule, programs: list[Program], rank: int, says: str, one_queue: bool = False) -> None:
    with pytest.raises(ScheduleError) as caught:
        replay(made, programs, one_queue_a_pair=one_queue)
    where, text = str(caught.value).split(f"rank {rank}: ", 1)
    assert re.fullmatch(rf"{made.name}, forward: step \d, ", where), caught.value
    assert text == says


def receive_first(program: Program) -> Program:
    """Waits for its first receive before its first send."""
    send = next(at for at, post in posts(program) if isinstance(post, Send))
    recv = next(post for _, post in posts(program) if isinstance(post, Recv))
    return move_up(program, wait_of(program, recv), send)
