"""replay accepts what lower makes and refuses programs with one thing wrong at one rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from typing import NamedTuple

import pytest
import torch
from bases import NAMED, bases, make
from symbolic import Machine, lower_all

from tokenring.errors import ScheduleError
from tokenring.schedule.ir import PASSES, Pass, Schedule
from tokenring.schedule.program import Attend, Instruction, Merge, Pack, Program, Recv, Release, Send, Span, Wait
from tokenring.schedule.replay import replay, replay_schedule
from tokenring.workload import Workload

BASES = bases()


class Mutant(NamedTuple):
    """A rank's program with one thing wrong; what replay must say, of which message, and of which ranks."""

    program: Program
    says: str
    label: str = ""
    ranks: tuple[int, ...] = ()  # empty: the rank itself


ANY = (0, 1, 2, 3)  # of the ranks that a deadlock holds up, one is named
Kind = Callable[[Program], Iterator[Mutant]]


def edit(program: Program, start: int, stop: int, *by: Instruction) -> Program:
    """Other instructions in place of [start, stop)."""
    step = program.steps[min(start, len(program.steps) - 1)]
    return replace(
        program,
        instructions=(*program.instructions[:start], *by, *program.instructions[stop:]),
        steps=(*program.steps[:start], *[step] * len(by), *program.steps[stop:]),
    )


def drop(program: Program, *places: int) -> Program:
    for at in sorted(places, reverse=True):
        program = edit(program, at, at + 1)
    return program


def swap(program: Program, first: int, second: int) -> Program:
    a, b = program.instructions[first], program.instructions[second]
    return edit(edit(program, first, first + 1, b), second, second + 1, a)


def move_up(program: Program, source: int, target: int) -> Program:
    return edit(drop(program, source), target, target, program.instructions[source])


def posts(program: Program) -> list[tuple[int, Recv | Send]]:
    return [(at, post) for at, post in enumerate(program.instructions) if isinstance(post, Recv | Send)]


def peer(post: Recv | Send) -> int:
    return post.src if isinstance(post, Recv) else post.dst


def find(program: Program, kind: type[Wait] | type[Release], number: int, start: int = 0) -> list[int]:
    """Where it waits for a message, or releases a slot. (As tuples, Wait(2) and Release(2) are equal.)"""
    each = enumerate(program.instructions)
    return [at for at, found in each if at >= start and isinstance(found, kind) and found[0] == number]


def wait_of(program: Program, post: Recv | Send) -> int:
    (at,) = find(program, Wait, post.message)
    return at


def last_release(program: Program, slot: int, before: int) -> int | None:
    return max((at for at in find(program, Release, slot) if at < before), default=None)


def spans_read(instruction: Instruction) -> list[Span]:
    match instruction:
        case Attend(q=q, kv=kv):
            return [q, kv]
        case Merge(source=source):
            return [source]
        case Send(span=span):
            return [span]
    return []


def overlap(a: Span, b: Span) -> bool:
    return a.slot == b.slot and a.start < b.stop and b.start < a.stop


# ---------- what can go wrong at one rank


def dropped_wait_for_a_receive(program: Program) -> Iterator[Mutant]:
    for _, post in posts(program):
        if isinstance(post, Recv):
            says = f"reads slot {post.span.slot} before waiting for receive {post.message} "
            yield Mutant(drop(program, wait_of(program, post)), says, post.label)


def dropped_wait_for_a_send(program: Program) -> Iterator[Mutant]:
    """Its slot would be written again while the message leaves."""
    for _, post in posts(program):
        if isinstance(post, Send):
            says = f"releases slot {post.span.slot} before waiting for send {post.message} "
            yield Mutant(drop(program, wait_of(program, post)), says, post.label)


def missing_final_wait(program: Program) -> Iterator[Mutant]:
    for _, post in posts(program):
        at = wait_of(program, post)
        rest = program.instructions[at + 1 :]
        if isinstance(post, Send) and all(isinstance(each, Wait | Release) for each in rest):
            (release,) = find(program, Release, post.span.slot, at)
            says = f"ends without waiting for send {post.message} "
            yield Mutant(drop(program, at, release), says, post.label)


def attend_before_its_wait(program: Program) -> Iterator[Mutant]:
    for _, post in posts(program):
        at = wait_of(program, post)
        after = program.instructions[at + 1] if at + 1 < len(program.instructions) else None
        if (
            isinstance(post, Recv)
            and isinstance(after, Attend)
            and any(overlap(post.span, s) for s in spans_read(after))
        ):
            yield Mutant(swap(program, at, at + 1), "reads slot .* before waiting for receive", post.label)


def receive_before_the_slot_is_free(program: Program) -> Iterator[Mutant]:
    for at, post in posts(program):
        release = last_release(program, post.span.slot, at)
        if isinstance(post, Recv) and release is not None:
            before = program.instructions[release - 1]
            if isinstance(before, Wait):  # for a send that leaves from there
                says = f"writes slot {post.span.slot} before waiting for send {before.message} |overwrites rows"
                yield Mutant(move_up(program, at, release - 1), says)
            yield Mutant(
                move_up(program, at, release), f"overwrites rows .* of slot {post.span.slot} before its release"
            )


def dropped_release_of_a_slot_received_into_again(program: Program) -> Iterator[Mutant]:
    for at, post in posts(program):
        release = last_release(program, post.span.slot, at)
        if isinstance(post, Recv) and release is not None:
            yield Mutant(drop(program, release), f"overwrites rows .* of slot {post.span.slot} before its release")


def early_release(program: Program) -> Iterator[Mutant]:
    """Before the last read of what a message brought, or before a send has left."""
    for at, instruction in enumerate(program.instructions):
        if isinstance(instruction, Release):
            slot = instruction.slot
            reads = [i for i in range(at) if any(span.slot == slot for span in spans_read(program.instructions[i]))]
            if reads:
                says = f"reads rows .* of slot {slot}, which hold nothing|releases slot {slot} before waiting for send"
                yield Mutant(move_up(program, at, reads[-1]), says)
            if reads and isinstance(program.instructions[reads[-1]], Send):
                yield Mutant(move_up(program, at, reads[-1] + 1), f"releases slot {slot} before waiting for send")


def dropped_receive(program: Program) -> Iterator[Mutant]:
    """Its peer cannot get rid of the message, or gets rid of it into the next receive."""
    for at, post in posts(program):
        if isinstance(post, Recv):
            says = f"waits for message {post.message}, which it never posted|meets|hold nothing"
            yield Mutant(drop(program, at), says, ranks=(program.rank, post.src))


def is_last_of_its_pair(program: Program, post: Recv | Send) -> bool:
    same = [each for _, each in posts(program) if type(each) is type(post) and each.channel == post.channel]
    return [each for each in same if peer(each) == peer(post)][-1] is post


def dropped_send_and_its_wait(program: Program) -> Iterator[Mutant]:
    """The last one of its pair, or all that follow would meet the wrong receives."""
    for at, post in posts(program):
        if isinstance(post, Send) and is_last_of_its_pair(program, post):
            mutant = drop(program, at, wait_of(program, post))
            yield Mutant(mutant, r"waits for ever for (receive|send) .*: a deadlock|meets", ranks=ANY)


def dropped_receive_and_its_wait(program: Program) -> Iterator[Mutant]:
    """The peer waits for its send; or what should have come is missed before."""
    for at, post in posts(program):
        if isinstance(post, Recv) and is_last_of_its_pair(program, post):
            mutant = drop(program, at, wait_of(program, post))
            yield Mutant(mutant, r"waits for ever for (receive|send) .*: a deadlock|meets|hold nothing", ranks=ANY)


def swapped_posts_of_one_kind(program: Program) -> Iterator[Mutant]:
    """Two sends to, or two receives from one peer, in the other order."""
    found = posts(program)
    for (first, a), (second, b) in pairwise(found):
        between = program.instructions[first + 1 : second]
        if type(a) is type(b) and (peer(a), a.channel) == (peer(b), b.channel) and not between:
            yield Mutant(swap(program, first, second), "meets", ranks=(program.rank, peer(a)))


def wrong_rows(program: Program) -> Iterator[Mutant]:
    for at, post in posts(program):
        if post.span.rows > 1:
            less = post._replace(span=post.span._replace(stop=post.span.stop - 1))
            # Or it is read at once: then the row that is missing shows first.
            says = f"{post.message} .* meets|meets (send|receive) {post.message} |hold nothing"
            yield Mutant(edit(program, at, at + 1, less), says, ranks=(program.rank, peer(post)))


def wrong_block(program: Program) -> Iterator[Mutant]:
    for at, post in posts(program):
        other = post._replace(label=f"{post.label},q99")
        yield Mutant(edit(program, at, at + 1, other), "meets", "q99", (program.rank, peer(post)))


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        dropped_wait_for_a_receive, dropped_wait_for_a_send, missing_final_wait, attend_before_its_wait,
        receive_before_the_slot_is_free, dropped_release_of_a_slot_received_into_again, early_release,
        dropped_receive, dropped_send_and_its_wait, dropped_receive_and_its_wait, swapped_posts_of_one_kind,
        wrong_rows, wrong_block,
    )
}  # fmt: skip


def workload_of(schedule: Schedule) -> Workload:
    groups = schedule.head_groups
    return Workload(1, schedule.q_layout.length, schedule.kv_layout.length, groups, groups, 2, torch.bfloat16)


@cache
def programs_of(base: str, direction: Pass, early: bool) -> list[Program]:
    return lower_all(BASES[base], workload_of(BASES[base]), direction, early_receives=early)


def mutants(kind: str, base: str) -> Iterator[tuple[list[Program], bool, int, Mutant]]:
    """A few of each pass and kind of transport, of different ranks."""
    for direction in PASSES:
        for early in (True, False):
            programs = programs_of(base, direction, early)
            found = [(rank, mutant) for rank, program in enumerate(programs) for mutant in KINDS[kind](program)]
            for index in sorted({0, len(found) // 3, len(found) // 2, len(found) - 1} if found else ()):
                rank, mutant = found[index]
                yield [*programs[:rank], mutant.program, *programs[rank + 1 :]], early, rank, mutant


def check_refused(programs: list[Program], early: bool, rank: int, mutant: Mutant) -> None:
    with pytest.raises(ScheduleError) as caught:
        replay("mutant", programs, one_queue_a_pair=not early)
    text = str(caught.value)
    parts = re.fullmatch(rf"mutant, {programs[0].direction}: step (\d+), rank (\d+): (.*)", text)
    assert parts, text
    assert any(int(parts[1]) in program.steps for program in programs), text
    assert int(parts[2]) in (mutant.ranks or (rank,)), text
    assert re.search(mutant.says, parts[3]), text
    assert mutant.label in parts[3], text


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", KINDS)
def test_mutant_is_refused(kind: str, base: str) -> None:
    for programs, early, rank, mutant in mutants(kind, base):
        check_refused(programs, early, rank, mutant)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_applies_to_several_schemes(kind: str) -> None:
    assert len({BASES[base].name for base in BASES for _ in mutants(kind, base)}) >= 2


class TestPairOrder:
    """Both directions of a pair in one queue (`one_queue_a_pair`), or each in its own."""

    @pytest.mark.parametrize("base", BASES)
    @pytest.mark.parametrize("direction", PASSES)
    def test_strict_programs_run_on_both(self, base: str, direction: Pass) -> None:
        for one_queue in (True, False):
            replay("strict", programs_of(base, direction, early=False), one_queue_a_pair=one_queue)

    @pytest.mark.parametrize("base", BASES)
    @pytest.mark.parametrize("direction", PASSES)
    def test_early_receives_need_a_queue_for_each_direction(self, base: str, direction: Pass) -> None:
        """Wherever two ranks send to each other in one step. (A ring's never do, from three ranks on.)"""
        programs = programs_of(base, direction, early=True)
        replay("early", programs, one_queue_a_pair=False)
        moves = {(move.step, move.src, move.dst, move.channel) for move in BASES[base].moves_in(direction)}
        cross = any((step, dst, src, channel) in moves for step, src, dst, channel in moves)
        assert cross == (BASES[base].name not in ("ring", "follow"))
        if cross:
            with pytest.raises(ScheduleError, match=r"step \d+, rank \d: waits for ever for .*: a deadlock"):
                replay("early", programs, one_queue_a_pair=True)
        else:
            replay("early", programs, one_queue_a_pair=True)

    def test_two_ranks_that_both_receive_first(self) -> None:
        programs = lower_all(make(2, "ring+", "zigzag", "full"), Workload(1, 32, 32, 1, 1, 2))
        replay("ring", programs, one_queue_a_pair=False)
        says = "step 1, rank 0: waits for ever for receive 0 (step 0, kv1,kv2, rank 1, requests): a deadlock"
        with pytest.raises(ScheduleError, match=re.escape(f"ring, forward: {says}")):
            replay("ring", programs, one_queue_a_pair=True)

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
            replay("swapped", with_mutant, one_queue_a_pair=False)
            with pytest.raises(ScheduleError, match=r"step \d+, rank \d: waits for ever for .*: a deadlock"):
                replay("swapped", with_mutant, one_queue_a_pair=True)


def steps_and_pair(post: Recv | Send) -> tuple[str, int, str]:
    return post.label.partition(",")[0], peer(post), post.channel


@pytest.mark.parametrize("named", NAMED)
def test_programs_of_32_ranks(named: str) -> None:
    replay_schedule(make(32, named, "zigzag", "causal"))


# ---------- what replay does not see: it follows slots, not what is in them; `symbolic` does


def wrong_contents(program: Program) -> Iterator[Program]:
    """What is computed or merged is left out, or takes the place of what is there, or is added to nothing."""
    for at, each in enumerate(program.instructions):
        if isinstance(each, Pack | Attend | Merge):
            yield drop(program, at)
        if isinstance(each, Merge):
            yield edit(program, at, at + 1, each._replace(first=not each.first))
        if isinstance(each, Attend):
            results = tuple(result._replace(first=not result.first) for result in each.results)
            yield edit(program, at, at + 1, each._replace(results=results))


@pytest.mark.parametrize("base", BASES)
def test_oracle_refuses_wrong_contents(base: str) -> None:
    programs = programs_of(base, "forward", early=True)
    Machine(BASES[base], programs).run()
    for program in programs[:2]:
        for mutant in [*wrong_contents(program)][:8]:
            with pytest.raises((AssertionError, KeyError)):
                Machine(BASES[base], [mutant if each is program else each for each in programs]).run()


@pytest.mark.xfail(strict=True, reason="replay is content with any written row among those that are read")
def test_dropped_pack() -> None:
    for base in BASES:
        programs = programs_of(base, "forward", early=True)
        for rank, program in enumerate(programs):
            for at, each in enumerate(program.instructions):
                if isinstance(each, Pack):
                    mutant = Mutant(drop(program, at), f"reads rows .* of slot {each.into.slot}, which hold nothing")
                    check_refused([*programs[:rank], mutant.program, *programs[rank + 1 :]], True, rank, mutant)
