"""Packs of documents: those of one shape are planned once, and each gets a schedule of its own."""

from __future__ import annotations

import torch
from exchanged import counted_texts
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.planner.choosing.pack_shapes import pack_shape
from tokenring.planner.choosing.planner import LIKE_BEFORE
from tokenring.sequence.layout import make_layout
from tokenring.sequence.workload import Request, Workload

LENGTH = 1024


def pack(*ends: int) -> tr.Mask:
    return tr.Causal() & tr.Documents([0, *ends, LENGTH])


ALIKE = [pack(20, 350, 380, 450, 950), pack(24, 352, 380, 448, 948), pack(26, 349, 377, 455, 951)]
LONGER = pack(20)


def request(mask: tr.Mask, heads: int = 4) -> Request:
    return Request(Workload(1, LENGTH, LENGTH, heads, 2, 16), mask, 0.25, True, torch.device("cpu"))


def test_shapes() -> None:
    def shape(mask: tr.Mask, layout: str = "contiguous", heads: int = 4) -> object:
        made = make_layout(layout, 4, LENGTH)
        return pack_shape(request(mask, heads), (made, made))

    assert shape(ALIKE[0]) == shape(ALIKE[1]) == shape(ALIKE[2]) is not None
    assert len({shape(ALIKE[0]), shape(LONGER), shape(ALIKE[0], "zigzag"), shape(ALIKE[0], heads=2)}) == 4
    assert shape(tr.Causal()) is shape(tr.SlidingWindow(8)) is shape(tr.Full()) is None
    assert shape(ALIKE[0], "striped") is None  # whose chunks lie between each other


def inputs() -> torch.Tensor:
    return torch.randn(1, LENGTH, 4, 16, generator=torch.Generator().manual_seed(2))


def results() -> list[torch.Tensor]:
    """In float64, of each pack once."""
    q = inputs()
    return [attention64(q, q, q, q, allowed(mask, LENGTH, LENGTH)).out for mask in (*ALIKE, LONGER)]


def reasons(here: Here, wanted: list[torch.Tensor]) -> list[tuple[str, float, int]]:
    """Of each pack: why its schedule, how exact it is, and how often the ranks told each other of a plan."""
    cp, found, q = here.cp(schedule="auto", layout="contiguous"), [], inputs()
    with counted_texts(cp) as exchanged:
        for mask, want in zip((*ALIKE, LONGER, *ALIKE), (*wanted, *wanted[: len(ALIKE)]), strict=True):
            exchanged.clear()
            part = tr.shard(q, cp)
            out = tr.attention(part, part, part, cp, mask=mask)
            error = relative_error(out, tr.shard(want, cp))
            found.append((tr.plan(part, part, part, cp, mask).reason, error, exchanged.count("the plan")))
    return found


def test_packs_of_one_shape_are_planned_once(ranks: RankPools) -> None:
    for found in ranks(2)(reasons, results()):
        assert all(error < 2e-6 for _, error, _ in found)
        assert [told > 0 for *_, told in found] == [True, False, False, True, False, False, False]
        like = [reason.startswith(LIKE_BEFORE) for reason, *_ in found]
        assert like == [False, True, True, False, False, True, True]
