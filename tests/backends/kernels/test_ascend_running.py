"""Tiles into the same rows, merged by npu_ring_attention_update: which are, that they are exact, and the trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend.operators import register
from ascend.ranks import NpuPools
from ranks import Here

from tokenring.backends.interfaces import RunningKernel, Tiles
from tokenring.backends.kernels import npu_running
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.backends.kernels.npu_operator import Operator
from tokenring.lowering.program import Attend, Fill, Instruction, Merge, Pack, Result, Send, Span, Wait
from tokenring.runtime.running import runs
from tokenring.sequence.region import Patch

FULL = Patch(0, 8, 0, 8)


def tile(start: int, stop: int, slot: int = 0, first: bool = False) -> Attend:
    span = Span(slot, start, stop)
    q = Span(-1, start, stop)
    patch = Patch(0, stop - start, 0, 4)
    return Attend(0, q, Span(5, 0, 4), patch, (Result("q_partial", 0, span, first),))


def found(program: list[Instruction]) -> list[list[int]]:
    return runs(program, {id(each) for each in program})


def test_which_tiles_run() -> None:
    """As a ring's: all rows, then half of them; waits and packs in between."""
    half, whole = [tile(4, 8) for _ in range(3)], [tile(0, 8) for _ in range(2)]
    own = tile(0, 8, first=True)
    pack = Pack("kv", Span(-1, 0, 1), Span(5, 0, 1))
    assert found([own, half[0], Wait(1), half[1], pack, half[2], whole[0], Wait(2), whole[1]]) == [[1, 3, 5], [6, 8]]
    assert found([own, *whole]) == [[0, 1, 2]]
    assert found([own, half[0], whole[0], half[1]]) == [[1], [2], [3]]  # not the one that is copied as it is


@pytest.mark.parametrize(
    "between",
    [
        Send(0, Span(0, 0, 4), 1, "partials", ""), Merge("q_partial", Span(3, 0, 4), Span(0, 0, 4), False),
        Merge("q_partial", Span(0, 0, 4), Span(3, 0, 4), True), Fill("q_partial", Span(0, 0, 4)),
        tile(4, 8)._replace(results=(Result("q_partial", 1, Span(0, 5, 8), False),)),
    ],
)  # fmt: skip
def test_what_ends_a_run(between: Instruction) -> None:
    tiles = [tile(4, 8) for _ in range(4)]
    assert found([*tiles[:2], between, *tiles[2:]]) == [[0, 1], [3, 4]]
    assert found([tiles[0], between, tiles[1]]) == [[0], [2]]


def test_calls_that_go_together_do_not_run() -> None:
    tiles: list[Instruction] = [tile(4, 8) for _ in range(3)]
    assert runs(tiles, {id(tiles[0]), id(tiles[1])}) == [[0, 1]]


def kernel() -> Any:
    tiles = Tiles((FULL,), "forward", 16, torch.bfloat16, torch.device("npu"))
    return NpuFusion().holding(tiles)


def tried(here: Here, wheel: str) -> list[bool]:
    """Whether tiles run: of this wheel's operator; of one that rounds to bf16; with rows that see nothing."""
    register(wheel)
    made = kernel()
    assert isinstance(made, RunningKernel)
    blind = Patch(0, 8, 0, 8, low=None, high=-2)
    return [made.runs([FULL, FULL]), made.runs([FULL, blind])]


@pytest.mark.parametrize(("wheel", "has"), [("2.13.0", True), ("2.7.1.post11", True), ("2.9.1", False)])
def test_where_the_operator_is(wheel: str, has: bool, npus: NpuPools) -> None:
    assert npus(1)(tried, wheel) == [[has, False]]


def rounding(here: Here) -> str | None:
    """What the trial finds of an operator whose running output is bf16."""
    register("2.13.0")
    right = npu_running.updating(torch.device("npu"))
    assert right is not None

    def rounds(*given: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        out, *statistics = right(*given, **options)
        return out.bfloat16().float(), *statistics

    return npu_running._fault(Operator(rounds, torch.ops.npu.npu_ring_attention_update.default._schema),
                              torch.device("npu"))  # fmt: skip


def test_an_operator_that_rounds_is_not_used(npus: NpuPools) -> None:
    (text,) = npus(1)(rounding)
    assert text is not None and "it does not merge in fp32" in text


def errors(here: Here) -> list[float]:
    """Of out and lse of five tiles, against float64 over all their columns at once."""
    register("2.13.0")
    made, random = kernel(), torch.Generator().manual_seed(0)
    q, *pairs = (torch.randn(2, 2, 8, 16, generator=random).bfloat16() for _ in range(11))
    ks, vs = pairs[:5], pairs[5:]
    running = None
    for k, v in zip(ks, vs, strict=True):
        given = [x.to("npu") for x in (q, k, v)]
        running = made.forward_running(running, *given, patch=FULL, scale=0.25)
    out, lse = (x.cpu().double() for x in made.results(running))
    scores = q.double() @ torch.cat(ks, 2).double().transpose(-1, -2) * 0.25
    right = scores.softmax(-1) @ torch.cat(vs, 2).double()
    return [float((out - right).abs().max()), float((lse - scores.logsumexp(-1)).abs().max())]


def test_five_tiles_are_as_exact_as_one_is(npus: NpuPools) -> None:
    """out has the rounding of each tile's result to bf16, and nothing of its merges."""
    ((out, lse),) = npus(1)(errors)
    assert out < 4e-3 and lse < 1e-6
