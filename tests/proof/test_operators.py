"""Operators beside attention: proved in rows and in columns, and refused with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import pytest
import torch
from program_mutants import drop, edit
from programs import lower_all

from tokenring.errors import ScheduleError
from tokenring.ir.operators import (
    COLUMN,
    COLUMN_DW,
    COLUMN_DX,
    COLUMN_X,
    GATHER,
    OPERATORS,
    REDUCE,
    ROW,
    ROW_DC,
    ROW_DW,
)
from tokenring.ir.schedule_data import ATTENTION, PASSES, Pass, TileOperator
from tokenring.lowering.pair_box import pair_box
from tokenring.lowering.program import NOTHING, Merge, Multiply, Pack, Program, Send
from tokenring.lowering.target import NO_END, Target
from tokenring.proof.replay import replay, replay_schedule
from tokenring.runtime.labels import Names
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Causal, Full
from tokenring.sequence.workload import Workload

NAMES = (
    "direct-q", "direct-q/pieces4", "tokenring", "direct-kv", "ring", "bidirectional", "bidirectional/pieces4",
    "tiles/2x2", "double-ring/2", "relay/2", "relay-q/2", "reduced/2", "mesh-q/2x2",
)  # fmt: skip
LINEAR = (COLUMN, ROW)
WIDE = (("kv_partial", "fp32"), ("q_partial", "fp32"))
HALVES = (COLUMN_DX, COLUMN_DW, ROW_DC, ROW_DW)


def made(name: str, operator: TileOperator, ranks: int = 4, rows: int = 8, columns: int = 8) -> Schedule:
    q, kv = make_layout("contiguous", ranks, ranks * rows), make_layout("contiguous", ranks, ranks * columns)
    return make_schedule(name, q, kv, Full()).replace(operator=operator)


@pytest.mark.parametrize("operator", LINEAR, ids=lambda each: each.name)
@pytest.mark.parametrize("name", NAMES)
def test_proved(name: str, operator: TileOperator) -> None:
    made(name, operator).verify()


@pytest.mark.parametrize("name", ("direct-q/pieces4", "tokenring", "ring", "tiles/2x2"))
def test_a_layer_that_keeps_rows_is_proved(name: str) -> None:
    """It moves what a column layer does, and no more."""
    kept, size = made(name, COLUMN_X).verify(), Workload(1, 32, 32, 1, 1, 16)
    assert Schedule.parse(str(kept)) == kept == Schedule.from_json(kept.to_json())
    assert kept.link_bytes(size, "forward") == made(name, COLUMN).link_bytes(size, "forward")


TARGETS = (
    Target(bundle_bytes=NO_END), Target(bundle_bytes=NO_END, ahead_bytes=NO_END),
    Target(early_receives=False, collectives=True),
)  # fmt: skip


@pytest.mark.parametrize("operator", LINEAR, ids=lambda each: each.name)
@pytest.mark.parametrize("name", ("direct-q/pieces4", "tokenring", "ring", "tiles/2x2", "reduced/2", "mesh-q/2x2"))
def test_proved_for_other_targets(name: str, operator: TileOperator) -> None:
    """Beside those for which every schedule is proved."""
    for codecs in ((), WIDE):
        replay_schedule(made(name, operator).replace(codecs=codecs), TARGETS)


@pytest.mark.parametrize("operator", LINEAR, ids=lambda each: each.name)
@pytest.mark.parametrize("name", NAMES)
def test_partials_in_fp32(name: str, operator: TileOperator) -> None:
    """Twice the bytes of what goes home, of what is not added to on its way; nothing else changes."""
    plain, size = made(name, operator), Workload(1, 32, 32, 1, 1, 16, torch.bfloat16)
    wide = plain.replace(codecs=WIDE).verify()
    assert Schedule.parse(str(wide)) == wide == Schedule.from_json(wide.to_json())
    partials = [move for move in plain.moves if move.block.kind.endswith("partial")]
    assert all(wide.in_full_precision(move) for move in partials)
    for direction in PASSES:
        home = operator.home[direction]
        narrow = sum(8 for move in partials if move.block.kind in home and not plain.in_full_precision(move))
        more = sum(wide.link_bytes(size, direction).values()) - sum(plain.link_bytes(size, direction).values())
        assert more == narrow * 16 * 2 // max(plain.q_pieces, plain.kv_pieces)


@pytest.mark.parametrize("operator", HALVES, ids=lambda each: each.name)
@pytest.mark.parametrize("name", ("direct-q/pieces4", "tokenring", "ring", "tiles/2x2", "reduced/2"))
def test_layers_with_half_a_backward_proved(name: str, operator: TileOperator) -> None:
    """They compute half, and never move more than the whole."""
    half, size = made(name, operator).verify(), Workload(1, 32, 32, 1, 1, 16)
    whole = made(name, COLUMN if operator.name.startswith("column") else ROW)
    assert {rank: 2 * flops for rank, flops in half.flops(size, "backward").items()} == whole.flops(size, "backward")
    links = whole.link_bytes(size, "backward")
    assert all(nbytes <= links[link] for link, nbytes in half.link_bytes(size, "backward").items())


@pytest.mark.parametrize("operator", (REDUCE, GATHER), ids=lambda each: each.name)
@pytest.mark.parametrize("name", ("direct-q", "direct-q/pieces4", "tokenring", "relay-q/2", "mesh-q/2x2"))
def test_collectives_proved(name: str, operator: TileOperator) -> None:
    made(name, operator, columns=1).verify()


@pytest.mark.parametrize("ranks", (1, 2, 3, 5, 6, 7, 8))
def test_ranks_and_uneven_sizes(ranks: int) -> None:
    for operator in LINEAR:
        for name in ("direct-q", "tokenring", "direct-kv"):
            made(name, operator, ranks).verify()
        q, kv = make_layout("contiguous", ranks, 8 * ranks - 1), make_layout("zigzag", ranks, 8 * ranks)
        make_schedule("direct-q", q, kv, Full()).replace(operator=operator).verify()


def test_boxes() -> None:
    """Where weights stay a rank has all tokens with its features; where tokens stay it is the other way round."""
    assert pair_box(made("direct-q", COLUMN), 1).shape == (32, 8)
    assert pair_box(made("ring", COLUMN), 1).shape == (8, 32)
    box = pair_box(made("tiles/2x2", COLUMN), 3)
    assert (box.shape, box.rows, box.columns) == ((16, 16), ((8, 16), (24, 32)), ((16, 32),))
    assert box.place("q", 25) == 9
    with pytest.raises(KeyError):
        box.place("q", 0)


def test_flops_and_bytes() -> None:
    """A weight that stays moves nothing; attention's figures are its own."""
    size = Workload(1, 32, 32, 1, 1, 16, torch.bfloat16)
    column, row = made("direct-q", COLUMN), made("direct-q", ROW)
    assert column.flops(size) == dict.fromkeys(range(4), 2 * 16 * 32 * 8)
    assert column.flops(size, "backward") == dict.fromkeys(range(4), 4 * 16 * 32 * 8)
    assert set(column.link_bytes(size).values()) == set(row.link_bytes(size).values()) == {8 * 16 * 2}
    assert set(column.link_bytes(size, "backward").values()) == {2 * 8 * 16 * 2}  # x again, and dx
    assert set(row.link_bytes(size, "backward").values()) == {8 * 16 * 2}  # dy


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda each: each.name)
def test_texts_read_back(operator: TileOperator) -> None:
    schedule = made("direct-q", operator)
    assert Schedule.parse(str(schedule)) == schedule == Schedule.from_json(schedule.to_json())
    said = operator is not ATTENTION
    assert ('"operator"' in schedule.to_json(), "operator" in str(schedule)) == (said, said)


def test_unknown_operators_are_refused() -> None:
    schedule = made("direct-q", COLUMN)
    with pytest.raises(ScheduleError, match=r"operator.*column"):
        Schedule.from_json(schedule.to_json().replace('"column"', '"diagonal"'))
    with pytest.raises(ScheduleError, match=r"diagonal.* is not one of attention, column"):
        Schedule.parse(str(schedule).replace("column", "diagonal"))


STRIPED = make_layout("striped", 4, 32)
REFUSED: dict[str, Callable[[Schedule], Schedule]] = {
    "Full": lambda made: made.replace(mask=Causal()),
    "head groups": lambda made: made.replace(head_groups=2),
    "nothing is kept": lambda made: made.replace(keep=frozenset({"kv"})),
    "those of attention are for q": lambda made: made.replace(operator=ATTENTION, codecs=WIDE),
    "two codecs": lambda made: made.replace(codecs=WIDE * 2),
    "striped": lambda made: made.replace(q_layout=STRIPED),
    "one rectangle": lambda made: made.replace(tiles=made.tiles[1:]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_schedules_that_do_not_fit(why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        REFUSED[why](made("tiles/2x2", COLUMN)).verify()


def test_a_rank_that_computes_nothing_is_missed() -> None:
    schedule = made("direct-q", COLUMN)
    with pytest.raises(ScheduleError, match=r"q\d never meets kv1|never needs it"):
        schedule.replace(tiles=tuple(tile for tile in schedule.tiles if tile.rank != 1)).verify()


# ---------- programs with one thing wrong


@cache
def programs(name: str, operator: TileOperator, direction: Pass) -> list[Program]:
    size = Workload(1, 32, 32, 1, 1, 16, torch.bfloat16)
    return lower_all(made(name, operator), size, direction)


def of_type(program: Program, *types: type) -> list[int]:
    return [at for at, each in enumerate(program.instructions) if isinstance(each, types)]


def shifted(rows: int, columns: int) -> Callable[[Program], Iterator[Program]]:
    def corners(program: Program) -> Iterator[Program]:
        for at in of_type(program, Multiply):
            call = program.instructions[at]
            assert isinstance(call, Multiply)
            corner = call.corner[0] + rows, call.corner[1] + columns
            yield edit(program, at, at + 1, call._replace(corner=corner))

    return corners


def swapped_rows(program: Program) -> Iterator[Program]:
    """Two products write each other's rows: each inside the tensor."""
    calls = of_type(program, Multiply)
    for one, other in pairwise(calls):
        a, b = program.instructions[one], program.instructions[other]
        assert isinstance(a, Multiply) and isinstance(b, Multiply)
        if a.corner != b.corner and (a.q.rows, a.kv.rows) == (b.q.rows, b.kv.rows):
            first = edit(program, one, one + 1, a._replace(corner=b.corner))
            yield edit(first, other, other + 1, b._replace(corner=a.corner))


def twice(program: Program) -> Iterator[Program]:
    for at in of_type(program, Multiply):
        yield edit(program, at, at, program.instructions[at])


def without_product(program: Program) -> Iterator[Program]:
    for at in of_type(program, Multiply):
        yield drop(program, at)


def without_factor(program: Program) -> Iterator[Program]:
    for at in of_type(program, Multiply):
        call = program.instructions[at]
        assert isinstance(call, Multiply)
        if not call.q.slot == call.kv.slot == NOTHING:
            q, kv = call.q._replace(slot=NOTHING), call.kv._replace(slot=NOTHING)
            yield edit(program, at, at + 1, call._replace(q=q, kv=kv))


def half_a_factor(program: Program) -> Iterator[Program]:
    """A product of both results is given one factor."""
    for at in of_type(program, Multiply):
        call = program.instructions[at]
        assert isinstance(call, Multiply)
        if len({result.kind for result in call.results}) == 2:
            yield edit(program, at, at + 1, call._replace(q=call.q._replace(slot=NOTHING)))


def lost(program: Program) -> Iterator[Program]:
    for at in of_type(program, Merge):
        yield drop(program, at)


def unpacked(program: Program) -> Iterator[Program]:
    for at in of_type(program, Pack):
        yield drop(program, at)


def early(program: Program) -> Iterator[Program]:
    """A partial is sent before the product that makes it."""
    for at in of_type(program, Multiply):
        sends = [each for each in of_type(program, Send) if each > at]
        if sends and program.instructions[at].results:  # type: ignore[union-attr]
            whole = edit(program, at, at, program.instructions[sends[0]])
            yield drop(whole, sends[0] + 1)


MUTANTS: dict[str, tuple[Callable[[Program], Iterator[Program]], str]] = {
    "wrong rows": (shifted(1, 0), "in its tensor of pairs|rows of|a second time|never computes|into"),
    "wrong columns": (shifted(0, 1), "in its tensor of pairs|a second time|never computes|into"),
    "rows of another": (swapped_rows, "tensor of pairs|into the rows|into"),
    "beyond the tensor": (shifted(32, 0), r"takes q \d+ to \d+ of \d+"),
    "before the tensor": (shifted(0, -1), "takes kv -1|other tokens|into"),
    "written twice": (twice, "second time|which nobody has used|hold nothing"),
    "a product lost": (without_product, "never computes|hold nothing|ends without"),
    "a factor lost": (without_factor, "computes without"),
    "a result without its factor": (half_a_factor, "without its factor"),
    "a partial lost": (lost, "nobody merged into|ends without|which nobody has used|hold nothing"),
    "not packed": (unpacked, "hold nothing"),
    "sent before it is made": (early, "hold nothing|nobody|before"),
}
CASES = [("direct-q", COLUMN), ("direct-q", ROW), ("ring", COLUMN), ("tiles/2x2", ROW)]


@pytest.mark.parametrize("kind", MUTANTS)
def test_mutants_are_refused(kind: str) -> None:
    tried = 0
    for name, operator in CASES:
        for direction in PASSES:
            right = programs(name, operator, direction)
            schedule = made(name, operator)
            replay(schedule, right, False)
            wrong, says = MUTANTS[kind]
            for mutant in list(wrong(right[1]))[:4]:
                tried += 1
                with pytest.raises(ScheduleError, match=says):
                    replay(schedule, [right[0], mutant, *right[2:]], False)
    assert tried


@pytest.mark.parametrize(
    ("name", "first"), [("direct-q/pieces4", "q_partial"), ("tokenring", "q_partial"), ("ring", "kv_partial")]
)
def test_what_leaves_is_made_first(name: str, first: str) -> None:
    """Backward of a column layer: partials are sent before the other products of their step, whose factors may come."""
    for program in programs(name, COLUMN, "backward"):
        apart = 0
        order = [
            (step, instruction)
            for instruction, step in zip(program.instructions, program.steps, strict=True)
            if isinstance(instruction, Multiply)
            or (isinstance(instruction, Send) and program.slots[instruction.span.slot].kind == first)
        ]
        for step in {step for step, _ in order}:
            here = [each for at, each in order if at == step]
            kinds = ["send" if isinstance(each, Send) else "".join(r.kind for r in each.results) for each in here]
            if "send" in kinds and len(kinds) > 1:
                apart += 1
                other = "kv_partial" if first == "q_partial" else "q_partial"
                assert list(dict.fromkeys(kinds)) == [first, "send", other]
        assert apart


def test_products_say_what_they_are_for() -> None:
    program = programs("direct-q", COLUMN, "backward")[0]
    said = [Names(program.instructions).of(program.instructions[at]) for at in of_type(program, Multiply)]
    assert said == [
        "multiply 0:8 × 0:8 for kv_partial for q_partial",
        "multiply 8:32 × 0:8 for q_partial",
        "multiply 8:32 × 0:8 for kv_partial",
    ]


def test_wrong_corners_where_a_side_carries_nothing() -> None:
    """Rows of a partial come from the tensor of pairs alone: those of others reach another's rows, and are refused."""
    right, schedule = programs("direct-q", REDUCE, "forward"), made("direct-q", REDUCE)
    for mutant in swapped_rows(right[2]):
        with pytest.raises(ScheduleError):
            replay(schedule, [*right[:2], mutant, right[3]], False)
