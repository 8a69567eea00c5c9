"""Schedules with wire formats: proved, smaller, and refused where something would be encoded again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from program_mutants import edit
from programs import lower_all

from tokenring.errors import ConfigurationError, ScheduleError
from tokenring.ir.operators import COLUMN, ROW
from tokenring.ir.passes import move_order
from tokenring.ir.schedule_data import ATTENTION, FULL, PASSES, Kind, TileOperator
from tokenring.ir.wire_formats import FORMATS, encoded
from tokenring.lowering.program import Merge, Multiply, Pack, Program, Recv, Send
from tokenring.lowering.records import aligned
from tokenring.lowering.target import NO_END, Target
from tokenring.proof.replay import replay, replay_schedule
from tokenring.proof.verify import verify_lowered
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Full
from tokenring.sequence.workload import Workload

NAMES = (
    "direct-q", "direct-q/pieces4", "tokenring", "direct-kv", "ring", "bidirectional/pieces4", "tiles/2x2",
    "double-ring/2", "relay/2", "relay-q/2", "reduced/2", "mesh-q/2x2",
)  # fmt: skip
LINEAR = (COLUMN, ROW)
REQUESTS: tuple[Kind, ...] = ("kv", "q")
SIZE = Workload(1, 32, 32, 1, 1, 128, torch.bfloat16)


def made(name: str, operator: TileOperator = COLUMN, form: str | None = None) -> Schedule:
    layout = make_layout("contiguous", 4, 32)
    plain = make_schedule(name, layout, layout, Full()).replace(operator=operator)
    if form is None:
        return plain
    kinds = (*REQUESTS, "q_partial") if operator in LINEAR else REQUESTS
    return encoded(plain, tuple((kind, form) for kind in kinds))


@pytest.mark.parametrize("operator", LINEAR, ids=lambda each: each.name)
@pytest.mark.parametrize("name", NAMES)
def test_proved(name: str, operator: TileOperator) -> None:
    wired = made(name, operator, "mxfp8").verify()
    assert Schedule.parse(str(wired)) == wired == Schedule.from_json(wired.to_json())
    adds = any(move.add for move in wired.moves if move.block.kind == "q_partial")
    assert wired.formats == dict.fromkeys(REQUESTS if adds else (*REQUESTS, "q_partial"), "mxfp8")


@pytest.mark.parametrize("name", ("ring", "direct-q/pieces4", "tokenring", "tiles/2x2", "relay/2"))
def test_requests_of_attention_proved(name: str) -> None:
    wired = made(name, ATTENTION, "mxfp4").verify()
    assert wired.formats == dict.fromkeys(REQUESTS, "mxfp4")


@pytest.mark.parametrize("name", ("direct-q/pieces4", "tokenring", "ring", "tiles/2x2", "mesh-q/2x2"))
def test_proved_for_other_targets(name: str) -> None:
    targets = (
        Target(bundle_bytes=NO_END), Target(bundle_bytes=NO_END, ahead_bytes=NO_END),
        Target(early_receives=False, collectives=True),
    )  # fmt: skip
    for operator in LINEAR:
        replay_schedule(made(name, operator, "mxfp8"), targets)
        verify_lowered(made(name, operator, "mxfp8"), Target(early_receives=False, batching=True))


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_of_requests_and_of_what_goes_home(form: str) -> None:
    """All that a column and a row layer move but gradients of weights, to the byte: 8 rows of 128 from rank to rank."""
    size, nbytes = replace(SIZE, dtype=torch.float32), 8 * FORMATS[form].row_bytes(128)
    for operator, moved in ((COLUMN, (1, 2)), (ROW, (1, 1))):
        wired = made("direct-q", operator, form)
        for direction, times in zip(PASSES, moved, strict=True):
            assert set(wired.link_bytes(size, direction).values()) == {times * nbytes}


def test_what_has_the_formats_dtype_is_left_as_it_is() -> None:
    plain, wired = made("ring"), made("ring", form="bf16")
    for direction in PASSES:
        assert wired.link_bytes(SIZE, direction) == plain.link_bytes(SIZE, direction)
        assert wired.peak_bytes(SIZE, direction) == plain.peak_bytes(SIZE, direction)
        assert lower_all(wired, SIZE, direction) == lower_all(plain, SIZE, direction)


def test_gradients_of_weights_go_as_they_are() -> None:
    size, plain, wired = SIZE, made("direct-kv"), made("direct-kv", form="mxfp8")
    fewer = sum(plain.link_bytes(size, "backward").values()) - sum(wired.link_bytes(size, "backward").values())
    w = 3 * 4 * 8  # rows that travel
    assert fewer == w * (256 - 132)


def test_memory_of_what_is_decoded_is_counted() -> None:
    """x of three peers, of 24 rows, encoded and decoded, beside a rank's own, encoded."""
    assert made("direct-q").peak_bytes(SIZE) == (24 + 8) * 256
    assert made("direct-q", form="mxfp8").peak_bytes(SIZE) == aligned(24 * 132) + aligned(8 * 132) + 24 * 256


@pytest.mark.parametrize("width", (16, 100))
def test_blocks_that_do_not_divide_a_width(width: int) -> None:
    size = replace(SIZE, head_dim=width)
    with pytest.raises(ConfigurationError, match=rf"mxfp8 .* blocks of 32 .* rows of {width}: take a width that is"):
        made("ring", form="mxfp8").link_bytes(size)
    made("ring", form="fp16").link_bytes(size)


def refused(kind: str, codec: str, operator: TileOperator = COLUMN, name: str = "ring") -> Schedule:
    return made(name, operator).replace(codecs=((kind, codec),))


REFUSED: dict[str, Callable[[], Schedule]] = {
    r"codec 'int3' of kv is not known; use one of bf16, fp16, mxint8": lambda: refused("kv", "int3"),
    r"codec 'fp32' of q is not known": lambda: refused("q", FULL),
    r"codec 'mxfp8' of kv_partial: gradients of weights are not": lambda: refused("kv_partial", "mxfp8"),
    r"codec 'bf16' of q_partial: those of attention are for q and kv": lambda: refused("q_partial", "bf16", ATTENTION),
    r"codec 'fp32' of q_partial: those of attention are for q": lambda: refused("q_partial", FULL, ATTENTION),
    r"codec 'mxfp8' of q_partial: a relay adds": lambda: refused("q_partial", "mxfp8", ROW, "reduced/2"),
    r"codec 'mxfp8' of o: those of": lambda: refused("o", "mxfp8"),
    r"has two codecs for one kind": lambda: made("ring").replace(codecs=(("q", "bf16"), ("q", "mxfp8"))),
}


@pytest.mark.parametrize("why", REFUSED)
def test_codecs_that_are_refused(why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        REFUSED[why]().verify()


# ---------- programs in which a rank encodes what is encoded


def with_slot(program: Program, like: int, full_precision: bool = False) -> tuple[Program, int]:
    """The program with one more slot, like another but in this precision."""
    spec = program.slots[like]._replace(full_precision=full_precision)
    return replace(program, slots=(*program.slots, spec)), len(program.slots)


def passed_on(program: Program, kinds: tuple[Kind, ...]) -> Iterator[tuple[int, Send]]:
    """Return where a relay sends on what it got."""
    got = {each.span for each in program.instructions if isinstance(each, Recv)}
    for at, each in enumerate(program.instructions):
        if isinstance(each, Send) and each.span in got and program.slots[each.span.slot].kind in kinds:
            yield at, each


def request_packed_again(program: Program) -> Iterator[tuple[Program, str]]:
    """It decodes what it got, and encodes that."""
    for at, send in passed_on(program, REQUESTS):
        longer, slot = with_slot(program, send.span.slot)
        there, kind = send.span._replace(slot=slot), program.slots[send.span.slot].kind
        again = edit(longer, at, at + 1, Pack(kind, send.span, there), send._replace(span=there))
        yield again, rf"packs rows of slot {send.span.slot}: what is not its own"


def partial_encoded_again(program: Program) -> Iterator[tuple[Program, str]]:
    for at, send in passed_on(program, ("q_partial",)):
        longer, slot = with_slot(program, send.span.slot)
        there = send.span._replace(slot=slot)
        again = edit(longer, at, at + 1, Merge("q_partial", send.span, there, True), send._replace(span=there))
        yield again, rf"encodes rows .* of slot {slot} again: rank \d did"


def partial_encoded_again_from_fp32(program: Program) -> Iterator[tuple[Program, str]]:
    """By way of an accumulator, as one that adds does."""
    for at, send in passed_on(program, ("q_partial",)):
        longer, wide = with_slot(program, send.span.slot, full_precision=True)
        longer, slot = with_slot(longer, send.span.slot)
        sums, there = send.span._replace(slot=wide), send.span._replace(slot=slot)
        merges = Merge("q_partial", send.span, sums, True), Merge("q_partial", sums, there, True)
        yield edit(longer, at, at + 1, *merges, send._replace(span=there)), rf"of slot {slot} again: rank \d did"


def added_to_what_is_encoded(program: Program) -> Iterator[tuple[Program, str]]:
    """Its own result goes into rows that came encoded."""
    for at, each in enumerate(program.instructions):
        for number, result in enumerate(each.results if isinstance(each, Multiply) else ()):
            if isinstance(each, Multiply) and not program.slots[result.into.slot].full_precision:
                results = (*each.results[:number], result._replace(first=False), *each.results[number + 1 :])
                yield edit(program, at, at + 1, each._replace(results=results)), "which are encoded"


def received_into_an_accumulator(program: Program) -> Iterator[tuple[Program, str]]:
    for number, slot in enumerate(program.slots):
        came = [each.span for each in program.instructions if isinstance(each, Recv) and each.span.slot == number]
        if came and slot.kind == "q_partial":
            slots = (*program.slots[:number], slot._replace(full_precision=True), *program.slots[number + 1 :])
            yield replace(program, slots=slots), "goes into a slot of another kind"


def by_way_of_a_relay() -> Schedule:
    """A row layer in which one partial goes home by way of another rank, which adds nothing to it."""
    whole = made("direct-q", ROW, "mxfp8")
    first = next(move for move in whole.moves if move.block.made_at == 2 and move.dst == 0)
    there = first._replace(dst=1), first._replace(step=first.step + 1, src=1)
    moves = sorted([*(each for each in whole.moves if each != first), *there], key=move_order)
    return whole.replace(moves=tuple(moves)).verify()


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "by way of a relay": by_way_of_a_relay,
    "ring": lambda: made("ring", COLUMN, "mxfp8"),
    "tokenring": lambda: made("tokenring", COLUMN, "mxfp8"),
    "tokenring of attention": lambda: made("tokenring", ATTENTION, "mxfp8"),
    "relay": lambda: made("relay/2", ROW, "mxfp8"),
    "direct": lambda: made("direct-q", ROW, "mxfp8"),
}
MUTANTS = [
    (request_packed_again, "ring"),
    (request_packed_again, "tokenring"),
    (request_packed_again, "tokenring of attention"),
    (request_packed_again, "relay"),
    (partial_encoded_again, "by way of a relay"),
    (partial_encoded_again_from_fp32, "by way of a relay"),
    (added_to_what_is_encoded, "by way of a relay"),
    (added_to_what_is_encoded, "direct"),
    (received_into_an_accumulator, "direct"),
]


@pytest.mark.parametrize(("mutate", "name"), MUTANTS, ids=[f"{mutate.__name__}-{name}" for mutate, name in MUTANTS])
def test_encoding_twice_is_refused(mutate: Callable[[Program], Iterator[tuple[Program, str]]], name: str) -> None:
    schedule = SCHEDULES[name]()
    programs = lower_all(schedule, SIZE)
    replay(schedule, programs, one_queue_a_pair=False)
    found = 0
    for rank, program in enumerate(programs):
        for mutant, says in mutate(program):
            found += 1
            with pytest.raises(ScheduleError, match=says):
                replay(schedule, [*programs[:rank], mutant, *programs[rank + 1 :]], one_queue_a_pair=False)
    assert found
