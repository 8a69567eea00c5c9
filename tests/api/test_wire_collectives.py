"""Collectives in wire formats: the same on every rank, errors of as many encodings as there are, bytes to the byte."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.backends.codecs.choice import codec_of, there_and_back
from tokenring.backends.interfaces import Transport
from tokenring.ir.schedule_data import PASSES
from tokenring.ir.wire_formats import FORMATS
from tokenring.planner.interconnects.interconnect import full_mesh

ROWS, WIDTH = 48, 65  # of a tensor that neither ranks nor blocks divide
POINTS = ((2, "direct-q"), (3, "auto"), (4, "direct-q/pieces4"), (4, "tokenring"), (4, "mesh-q/2x2"))
ADDED = ("mesh-q/2x2",)  # parts that are added to on their way go in fp32
Summed = tuple[torch.Tensor, dict[int, int], dict[int, int]]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(world: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([values(rank, ROWS, WIDTH, dtype=dtype).double() for rank in range(world)]).sum(0)


def transport_of(here: Here) -> Transport:
    assert here.base.transport is not None
    return here.base.transport


def summed(here: Here, schedule: str, dtype: torch.dtype, wire: str | None) -> Summed:
    """The sum, and the bytes that this rank sent: counted, and as planned."""
    counter = transport_of(here).sent_bytes
    with tr.TensorParallel(schedule=schedule, transport=transport_of(here), wire=wire) as tp:
        mine = values(here.rank, ROWS, WIDTH, dtype=dtype)
        counter.clear()
        made, sent = tr.all_reduce(mine, tp), {dst: n for dst, n in counter.items() if n}
        request = tp.collective(mine.numel(), mine)
        planned: dict[int, int] = {}
        for each in PASSES:
            for (src, dst), size in tp.schedule_of(request).link_bytes(request.workload, each).items():
                if src == here.rank and size:
                    planned[dst] = planned.get(dst, 0) + size
    return made, sent, planned


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize(("world", "schedule"), POINTS)
def test_errors_and_bytes(ranks: RankPools, world: int, schedule: str, dtype: torch.dtype) -> None:
    """A part is encoded on its way to the sum, but for the owner's, and the sum on its way to all: two steps, two."""
    parts, plain = (ranks(world)(summed, schedule, dtype, wire) for wire in ("mxfp8", None))
    wanted = total(world, dtype)
    alone = relative_error(plain[0][0], wanted)
    encodings = 1.0 if schedule in ADDED else 1 + (world - 1) / world
    more = math.sqrt(encodings) * FORMATS["mxfp8"].relative_rms
    for (made, sent, planned), (_, before, _) in zip(parts, plain, strict=True):
        assert made.dtype == dtype and made.equal(parts[0][0])
        assert 0.8 * more <= relative_error(made, wanted) <= math.hypot(1.1 * more, 2 * alone)
        assert sent == planned
        if schedule not in ADDED and dtype == torch.bfloat16:
            assert sum(before.values()) >= 1.85 * sum(sent.values())  # 3,120 elements are padded to whole blocks


@pytest.mark.parametrize("wire", ("mxint8", "mxfp8", "mxfp8-e5m2", "mxfp4"))
def test_bytes_against_bf16(ranks: RankPools, wire: str) -> None:
    """Take a tensor that ranks and blocks divide, and what two steps send."""
    sent = {each: ranks(2)(sent_by_two_steps, each) for each in (None, wire)}
    least = 3.7 if wire == "mxfp4" else 1.93
    assert all(before >= least * fewer > 0 for before, fewer in zip(*sent.values(), strict=True))


def sent_by_two_steps(here: Here, wire: str | None) -> int:
    counter = transport_of(here).sent_bytes
    with tr.TensorParallel(transport=transport_of(here), wire=wire) as tp:
        counter.clear()
        tr.all_reduce(values(here.rank, 4096, dtype=torch.bfloat16), tp)
        return sum(counter.values())


def scattered(here: Here, schedule: str, rows: int, wire: str) -> tuple[torch.Tensor, torch.Tensor]:
    with tr.TensorParallel(schedule=schedule, transport=transport_of(here), wire=wire) as tp:
        return tr.reduce_scatter(values(here.rank, 2 * rows, 32), tp), tr.all_gather(values(here.rank, rows, 32), tp)


@pytest.mark.parametrize("schedule", ("direct-q", "direct-q/pieces4"))
@pytest.mark.parametrize("wire", [name for name, form in FORMATS.items() if form.block > 1])
def test_reduce_scatter_and_all_gather(ranks: RankPools, wire: str, schedule: str) -> None:
    """To the bit: what others send is as the codec makes it, in blocks of 32 from each rank's first element on."""
    rows, codec = 4, codec_of(wire)
    parts = ranks(2)(scattered, schedule, rows, wire)
    gathered = torch.cat([there_and_back(codec, values(rank, rows, 32))[1] for rank in range(2)])
    for rank, (made, every) in enumerate(parts):
        mine, other = (values(each, 2 * rows, 32)[rank * rows :][:rows] for each in (rank, 1 - rank))
        assert made.equal(mine + there_and_back(codec, other)[1])
        assert every.equal(gathered)


def small(here: Here) -> list[torch.Tensor]:
    with tr.TensorParallel(transport=transport_of(here), wire="mxfp8") as tp:
        return [tr.all_reduce(torch.full(shape, 1.0 + here.rank), tp) for shape in ((), (1,), (7,))]


def test_small_tensors_are_padded(ranks: RankPools) -> None:
    for made in ranks(3)(small):
        assert [list(each.shape) for each in made] == [[], [1], [7]]
        assert all(each.eq(6.0).all() for each in made)  # which E4M3 has


def test_a_choice_by_topology_counts_whole_blocks() -> None:
    with tr.TensorParallel("self", wire="mxfp8", topology=full_mesh(1, 1.0)) as tp:
        assert tr.all_reduce(torch.ones(33), tp).eq(1).all()
    from tokenring.planner.choosing.linear import collective

    codecs = (("q", "mxfp8"), ("q_partial", "mxfp8"))
    assert collective(33, torch.bfloat16, 4, full_mesh(4, 1.0), codecs) == "direct-q"


def refusal(here: Here, what: str) -> str:
    """The error of a collective in a format that does not fit, or that one rank lacks; the group lives on."""
    wire = {"dtype": "fp16", "format": "mxint8" if here.rank else "mxfp8"}[what]
    with tr.TensorParallel(transport=transport_of(here), wire=wire) as tp, pytest.raises(tr.TokenRingError) as caught:
        tr.all_reduce(torch.ones(64, dtype=torch.bfloat16), tp)
    with tr.TensorParallel(transport=transport_of(here), wire="mxfp8") as tp:
        assert tr.all_reduce(torch.ones(64), tp).eq(2).all()
    return str(caught.value)


REFUSED = {
    "dtype": "fp16 on the wire has 16 bits an element, and saves nothing over torch.bfloat16",
    "format": "wire: rank 0: mxfp8; rank 1: mxint8",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_on_all_ranks(ranks: RankPools, what: str) -> None:
    for text in ranks(2)(refusal, what):
        assert REFUSED[what] in text
