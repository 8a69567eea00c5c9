"""Programs with one thing wrong at one rank, and what replay must say of each.

A kind is a function from a rank's program to mutants of it: one for every place where that can go wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from tokenring.lowering.program import (
    OWN,
    Attend,
    Instruction,
    Merge,
    Pack,
    Program,
    Recv,
    Result,
    Send,
    Span,
    Wait,
)


class Mutant(NamedTuple):
    """A rank's program with one thing wrong; what replay must say, of which message, and of which ranks."""

    program: Program
    says: str
    label: str = ""
    ranks: tuple[int, ...] = ()  # empty: the rank itself


ANY = (0, 1, 2, 3)  # what is wrong shows elsewhere
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


def wait_of(program: Program, post: Recv | Send) -> int:
    return program.instructions.index(Wait(post.message))


def last_read(program: Program, span: Span, before: int) -> int | None:
    """Where these rows are read last before an instruction."""
    reads = (at for at in range(before) if any(overlap(span, each) for each in spans_read(program.instructions[at])))
    return max(reads, default=None)


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
    """Its slot is written again while the message leaves; or the program ends."""
    for _, post in posts(program):
        if isinstance(post, Send):
            says = f"(writes slot {post.span.slot} before|ends without) waiting for send {post.message} "
            yield Mutant(drop(program, wait_of(program, post)), says, post.label)


def missing_final_wait(program: Program) -> Iterator[Mutant]:
    for _, post in posts(program):
        at = wait_of(program, post)
        rest = program.instructions[at + 1 :]
        if isinstance(post, Send) and all(isinstance(each, Wait) for each in rest):
            yield Mutant(drop(program, at), f"ends without waiting for send {post.message} ", post.label)


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
    """Before the last read of what lies in its rows, or before a send of it has left."""
    for at, post in posts(program):
        use = last_read(program, post.span, at)
        if not isinstance(post, Recv) or use is None:
            continue
        slot, last = post.span.slot, program.instructions[use]
        between = program.instructions[use:at]
        if not any(isinstance(each, Recv | Send) and peer(each) == post.src for each in between):
            says = (
                f"reads slot {slot} before waiting for receive {post.message} |"
                f"writes slot {slot} before waiting for send |overwrites rows .* of slot {slot}"
            )
            yield Mutant(move_up(program, at, use), says)
        if isinstance(last, Send):
            says = f"writes slot {slot} before waiting for send {last.message} "
            yield Mutant(move_up(program, at, wait_of(program, last)), says)


def received_over_an_unused_result(program: Program) -> Iterator[Mutant]:
    """The merge or the send of what lies there is gone, and with it the only use that a result has."""
    for at, post in posts(program):
        use = last_read(program, post.span, at)
        if isinstance(post, Recv) and use is not None and isinstance(program.instructions[use], Merge):
            says = f"overwrites rows .* of slot {post.span.slot}, which (?:nobody|are kept)|{NOTHING}"
            yield Mutant(drop(program, use), says, ranks=ANY)


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
            says = rf"never sends .* to rank {post.dst}, .* waits for ever for receive .*: a deadlock|meets"
            yield Mutant(mutant, says, post.label, (program.rank, post.dst))


def dropped_receive_and_its_wait(program: Program) -> Iterator[Mutant]:
    """The peer waits for its send; or what should have come is missed before, or what lay there is taken for it."""
    for at, post in posts(program):
        if isinstance(post, Recv) and is_last_of_its_pair(program, post):
            mutant = drop(program, at, wait_of(program, post))
            says = (
                rf"never receives .* from rank {post.src}, .* waits for ever for send .*: a deadlock|"
                rf"meets|hold nothing|merges {BLOCK}\S* into {BLOCK}|puts {BLOCK}\S* home into the rows of {BLOCK}"
            )
            yield Mutant(mutant, says, ranks=ANY)


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


# ---------- what can go wrong with what is computed and merged

BLOCK = r"\b(q|kv|o|dkv)\d+"
NOTHING = rf"which hold nothing.*{BLOCK}|{BLOCK}.* which hold nothing"
WITHOUT = rf"ends without (a result for )?{BLOCK}"


def merges_home(program: Program) -> Iterator[tuple[int, Merge]]:
    home = dict(program.home)
    for at, each in enumerate(program.instructions):
        if isinstance(each, Merge) and each.into.slot == home[each.kind]:
            yield at, each


def dropped_home_merge(program: Program) -> Iterator[Mutant]:
    """The partial is lost; or what comes next finds nothing to be merged into."""
    for at, merge in merges_home(program):
        lost = rf"ends without {BLOCK}\S*@\d, which rank \d made in step \d and nobody merged into its result"
        says = rf"merges {BLOCK}.* which hold nothing|ends without a result for {BLOCK}" if merge.first else lost
        yield Mutant(drop(program, at), says)


def dropped_merge(program: Program) -> Iterator[Mutant]:
    """On the way as well, or into the slot that a partial is sent from."""
    for at, each in enumerate(program.instructions):
        if isinstance(each, Merge):
            says = rf"{NOTHING}|{WITHOUT}|overwrites rows .*, which (?:nobody|are kept).*{BLOCK}"
            yield Mutant(drop(program, at), says, ranks=ANY)


def flipped_first(program: Program) -> Iterator[Mutant]:
    """Something is overwritten, or merged with what an older block left in the slot."""
    says = rf"overwrites .*{BLOCK}|merges {BLOCK}.* which hold nothing"
    for at, each in enumerate(program.instructions):
        if isinstance(each, Merge):
            yield Mutant(edit(program, at, at + 1, each._replace(first=not each.first)), says)
        if isinstance(each, Attend):
            for index, result in enumerate(each.results):
                other = result._replace(first=not result.first)
                yield Mutant(edit(program, at, at + 1, with_result(each, index, other)), says)


def with_result(attend: Attend, index: int, *by: Result) -> Attend:
    return attend._replace(results=(*attend.results[:index], *by, *attend.results[index + 1 :]))


def merged_twice(program: Program) -> Iterator[Mutant]:
    for at, each in enumerate(program.instructions):
        if isinstance(each, Merge):
            mutant = edit(program, at + 1, at + 1, each._replace(first=False))
            yield Mutant(mutant, rf"reads rows .* of slot {each.source.slot}, which hold nothing .*{BLOCK}")


def result_put_twice(program: Program) -> Iterator[Mutant]:
    """What a kernel made is merged with itself."""
    for at, each in enumerate(program.instructions):
        if isinstance(each, Attend):
            for index, result in enumerate(each.results):
                mutant = with_result(each, index, result, result._replace(first=False))
                says = rf"merges {BLOCK}\S* a second time: rank \d made that in step \d"
                yield Mutant(edit(program, at, at + 1, mutant), says)


def merged_into_other_rows(program: Program) -> Iterator[Mutant]:
    """At home, into the rows of another block."""
    for at, merge in merges_home(program):
        rows, into = program.slots[merge.into.slot].rows, merge.into
        for by in (into.rows, -into.rows):
            if into.start + by >= 0 and into.stop + by <= rows:
                other = merge._replace(into=into._replace(start=into.start + by, stop=into.stop + by))
                says = rf"puts {BLOCK}\S*@\d home into the rows of {BLOCK}"
                yield Mutant(edit(program, at, at + 1, other), says)


def merged_into_another_slot(program: Program) -> Iterator[Mutant]:
    """Another accumulator of that kind, which holds results for other tokens, or nothing."""
    home = dict(program.home)
    for at, each in enumerate(program.instructions):
        if isinstance(each, Merge):
            for slot, spec in enumerate(program.slots):
                if (
                    spec.kind == each.kind
                    and spec.rows >= each.into.stop
                    and slot not in (each.into.slot, each.source.slot, home[each.kind])
                ):
                    mutant = edit(program, at, at + 1, each._replace(into=each.into._replace(slot=slot)))
                    says = (
                        rf"merges {BLOCK}.* into {BLOCK}|overwrites .*{BLOCK}|before waiting for .*{BLOCK}|"
                        rf"{NOTHING}|{WITHOUT}"
                    )
                    yield Mutant(mutant, says, ranks=ANY)


def dropped_pack(program: Program) -> Iterator[Mutant]:
    for at, each in enumerate(program.instructions):
        if isinstance(each, Pack):
            says = rf"reads rows .* of slot {each.into.slot}, which hold nothing .*{BLOCK}"
            yield Mutant(drop(program, at), says)


def packed_from_other_rows(program: Program) -> Iterator[Mutant]:
    for at, each in enumerate(program.instructions):
        if isinstance(each, Pack) and each.source.start >= each.source.rows:
            source = each.source._replace(start=each.source.start - each.source.rows, stop=each.source.start)
            says = (
                rf"(puts|merges) {BLOCK}.*into|computes {BLOCK}.* with {BLOCK}|never computes {BLOCK}|"
                rf"computes (with other q than it kept|some tokens twice in one call), for {BLOCK}"
            )
            yield Mutant(edit(program, at, at + 1, each._replace(source=source)), says, ranks=ANY)


def dropped_kernel_call(program: Program) -> Iterator[Mutant]:
    says = rf"{NOTHING}|{WITHOUT}|never computes {BLOCK}"
    for at, each in enumerate(program.instructions):
        if isinstance(each, Attend):
            yield Mutant(drop(program, at), says, ranks=ANY)


def dropped_result(program: Program) -> Iterator[Mutant]:
    """What a kernel made is not put anywhere."""
    for at, each in enumerate(program.instructions):
        if isinstance(each, Attend):
            for index in range(len(each.results)):
                yield Mutant(edit(program, at, at + 1, with_result(each, index)), f"{NOTHING}|{WITHOUT}", ranks=ANY)


def computed_twice(program: Program) -> Iterator[Mutant]:
    """The second result is merged with the first: each pair counts twice."""
    for at, each in enumerate(program.instructions):
        if isinstance(each, Attend):
            again = each._replace(results=tuple(result._replace(first=False) for result in each.results))
            mutant = edit(program, at + 1, at + 1, again)
            yield Mutant(mutant, rf"computes {BLOCK}\S* with {BLOCK}\S* a second time")


def other_mask(program: Program) -> Iterator[Mutant]:
    """A triangle a token too narrow or too wide, or none at all where there is one, or the other way."""
    says = rf"computes {BLOCK}\S* with {BLOCK}\S* otherwise than the mask"
    for at, each in enumerate(program.instructions):
        if isinstance(each, Attend):
            patch = each.patch
            for high in (0, None) if patch.high is None else (None, patch.high + 1, patch.high - 1):
                if high != patch.high:
                    mutant = each._replace(patch=patch._replace(high=high))
                    yield Mutant(edit(program, at, at + 1, mutant), says, ranks=ANY)


def computed_on_other_rows(program: Program) -> Iterator[Mutant]:
    """Own rows, of another block than its tile's."""
    says = rf"(computes|never computes) {BLOCK}|puts {BLOCK}.* home into|merges {BLOCK}.* into|ends without {BLOCK}"
    for at, each in enumerate(program.instructions):
        if isinstance(each, Attend):
            for span in (each.q, each.kv):
                if span.slot == OWN and span.start >= span.rows:
                    other = span._replace(start=span.start - span.rows, stop=span.start)
                    mutant = each._replace(q=other) if span is each.q else each._replace(kv=other)
                    yield Mutant(edit(program, at, at + 1, mutant), says, ranks=ANY)


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        dropped_wait_for_a_receive, dropped_wait_for_a_send, missing_final_wait, attend_before_its_wait,
        receive_before_the_slot_is_free, received_over_an_unused_result,
        dropped_receive, dropped_send_and_its_wait, dropped_receive_and_its_wait, swapped_posts_of_one_kind,
        wrong_rows, wrong_block, dropped_home_merge, dropped_merge, flipped_first, merged_twice, result_put_twice,
        merged_into_other_rows, merged_into_another_slot, dropped_pack, packed_from_other_rows, dropped_kernel_call,
        dropped_result, computed_twice, other_mask, computed_on_other_rows,
    )
}  # fmt: skip
