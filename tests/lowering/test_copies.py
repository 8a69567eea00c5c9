"""Copies made as one: the same memory holds the same, with fewer copies; and which instructions copy together."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tokenring.lowering.copies import Copied, CopyRun, MemoryPlace, as_one, copy_runs
from tokenring.lowering.program import Attend, Instruction, Merge, Pack, Recv, Send, Span, Wait
from tokenring.runtime.copying import BoundCopy, Copies
from tokenring.sequence.region import Patch

HEADS, ROWS, STEP = 6, 40, 8


def parts(tensor: torch.Tensor, wanted: list[tuple[int, int]]) -> list[torch.Tensor]:
    return [tensor[head, row : row + STEP] for head, row in wanted]


def bound(sources: list[torch.Tensor], into: list[torch.Tensor]) -> Copies:
    pairs = zip(sources, into, strict=True)
    return Copies([BoundCopy(lambda _, x=a: x, lambda _, x=b: x, ("from", "to")) for a, b in pairs])  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(40))
def test_any_copies(seed: int) -> None:
    """Of random blocks, in any order; rows in the same order on both sides, or in the other one."""
    draw = random.Random(seed)
    wanted = [(head, row) for head in range(HEADS) for row in range(0, ROWS, STEP) if draw.random() < 0.7]
    draw.shuffle(wanted)
    turned = [(head, ROWS - STEP - row if seed % 2 else row) for head, row in wanted]
    source = torch.randn(HEADS, ROWS, 3, 4)
    alone, together = torch.zeros(HEADS, ROWS, 3, 4, dtype=torch.bfloat16), torch.zeros(HEADS, ROWS, 3, 4)
    for given, target in zip(parts(source, wanted), parts(alone, turned), strict=True):
        target.copy_(given)
    copies = bound(parts(source, wanted), parts(together, turned))
    copies(None, "as they lie")
    assert torch.equal(together.bfloat16(), alone)
    assert len(copies._known["as they lie"]) <= len(wanted)


def places(*offsets: tuple[int, int]) -> list[tuple[MemoryPlace, MemoryPlace]]:
    """Blocks of two rows of four, rows 8 apart, at these offsets on both sides."""
    return [
        (MemoryPlace("a", torch.float32, one, (2, 4), (8, 1)), MemoryPlace("b", torch.float32, other, (2, 4), (8, 1)))
        for one, other in offsets
    ]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (places((0, 0), (16, 16)), [Copied(0, (4, 4), (8, 1), (8, 1))]),  # rows that follow each other
        (places((16, 16), (0, 0)), [Copied(1, (4, 4), (8, 1), (8, 1))]),
        (places((0, 0), (16, 48)), [Copied(0, (2, 2, 4), (16, 8, 1), (48, 8, 1))]),  # equally far apart
        (places((0, 0), (0, 16), (0, 32)), [Copied(0, (3, 2, 4), (0, 8, 1), (16, 8, 1))]),  # one to several
        (places((0, 16), (16, 0)), [Copied(0, (2, 4), (8, 1), (8, 1)), Copied(1, (2, 4), (8, 1), (8, 1))]),  # backwards
        (
            places((0, 0), (100, 200), (1000, 7), (1100, 207)),
            [Copied(0, (2, 2, 2, 4), (1000, 100, 8, 1), (7, 200, 8, 1))],
        ),
    ],
)
def test_what_becomes_one(given: Any, wanted: Any) -> None:
    assert as_one(given) == wanted


def test_memories_and_dtypes_stay_apart() -> None:
    (one, into), (other, also) = places((0, 0), (16, 16))
    assert len(as_one([(one, into), (other, also)])) == 1
    for changed in ({"home": "c"}, {"dtype": torch.bfloat16}, {"strides": (9, 1)}):
        assert len(as_one([(one, into), (other._replace(**changed), also)])) == 2
        assert len(as_one([(one, into), (other, also._replace(**changed))])) == 2


def test_callers_tensors_that_lie_otherwise_are_looked_at_again() -> None:
    target, found = torch.zeros(4, 6), []
    for source in (torch.randn(4, 6), torch.randn(6, 4).t()):
        copies = [
            BoundCopy(lambda own, at=at: own[at : at + 2], lambda _, at=at: target[at : at + 2], ("own", "pool"))  # type: ignore[misc]
            for at in (0, 2)
        ]
        found.append(Copies(copies))
        for each in found:
            target.zero_()
            each(source, source.stride())
            assert torch.equal(target, source)
    assert len(found[0]._known) == 2


SPAN = Span(0, 0, 1)
PACK, OTHER = Pack("q", SPAN, SPAN), Attend(0, SPAN, SPAN, Patch(0, 1, 0, 1), ())
FIRST, MORE = Merge("q_partial", SPAN, SPAN, True), Merge("q_partial", SPAN, SPAN, False)
SEND, RECV = Send(0, SPAN, 1, "requests", ""), Recv(1, SPAN, 1, "requests", "")


def test_which_copy_together() -> None:
    """Packs at the first of them; what is put home behind the last message at the last of it."""
    program: list[Instruction] = [PACK, PACK, SEND, PACK, RECV, PACK, Wait(1), PACK, PACK]
    program += [FIRST, Wait(0), FIRST, MORE, FIRST, FIRST, OTHER]
    assert list(copy_runs(program)) == [
        CopyRun(0, (0, 1)), CopyRun(7, (7, 8)), CopyRun(11, (9, 11)), CopyRun(14, (13, 14))
    ]  # fmt: skip


def test_nothing_is_put_off_beyond_a_message() -> None:
    """A message could need the rows, or overwrite those that are still to be copied."""
    assert list(copy_runs([FIRST, Wait(0), FIRST, SEND])) == []
    assert list(copy_runs([FIRST, SEND, FIRST, OTHER, FIRST])) == []
