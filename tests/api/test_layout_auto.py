"""layout="auto": the sequence is cut by its mask; a call knows how its tensors were cut, or is refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.api.cuts import Cuts
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.planner import LIKE_BEFORE
from tokenring.planner.interconnects.interconnect import full_mesh, switch
from tokenring.planner.layouts.balanced import NAME, balanced_layout
from tokenring.runtime.agreement import Disagreement

LENGTH, HEADS, KV_HEADS, DIM = 1024, 4, 2, 16
PACK = tr.Causal() & tr.Documents([0, 20, 350, 380, 450, 950, 1024])


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(1, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def errors(here: Here, schedule: str, how: str) -> list[float]:
    """Of out and of all gradients. how: the mask, or the layout, is named at each step."""
    cp = here.cp(schedule=schedule, layout="auto")
    layout = cp.layout_for(LENGTH, PACK)
    assert layout.name == NAME
    by: dict[str, Any] = {"mask": PACK} if how == "mask" else {"layout": layout}
    q, k, v, dout = tensors()
    want = attention64(q, k, v, dout, allowed(PACK, LENGTH, LENGTH))
    parts = [tr.shard(x, cp, **by).requires_grad_() for x in (q, k, v)]
    where = tr.positions(cp, LENGTH, **by)
    assert torch.equal(parts[0], q[:, where])
    out = tr.attention(parts[0], parts[1], parts[2], cp, mask=PACK, layout=None if how == "mask" else layout)
    torch.autograd.backward(out, tr.shard(dout, cp, **by))
    found = [out.detach(), *(part.grad for part in parts if part.grad is not None)]
    whole = [tr.unshard(x, cp, **by) for x in found]
    return [relative_error(a, b) for a, b in zip(whole, (want.out, want.dq, want.dk, want.dv), strict=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("schedule", "how"), [*product(["direct-kv", "ring", "tokenring", "ulysses"], ["mask"]), ("ring", "layout")]
)
def test_attention_is_exact(schedule: str, how: str, ranks: RankPools) -> None:
    for found in ranks(2)(errors, schedule, how):
        assert max(found) < 5e-6, found


def test_attention_is_exact_on_four_ranks(ranks: RankPools) -> None:
    assert max(map(max, ranks(4)(errors, "auto", "mask"))) < 5e-6


def refused(here: Here, how: str) -> tuple[str, str]:
    """What a call says, and what the next one does."""
    cp = here.cp(schedule="ring", layout="auto")
    x = torch.zeros(1, LENGTH // here.world_size, HEADS, DIM)
    whole = torch.zeros(1, LENGTH, HEADS, DIM)
    layouts: dict[str, Any] = {"shorter": tr.ContextParallel("self").layout_for(64), "a text": "zigzag"}
    try:
        if how == "not cut":
            tr.attention(x, x, x, cp, mask=PACK)
        elif how == "cut by another mask":
            part = tr.shard(whole, cp, mask=PACK)
            tr.attention(part, part, part, cp, mask=PACK & tr.SlidingWindow(20))
        elif how == "no mask":
            tr.shard(whole, cp)
        elif how == "of two lengths":
            tr.attention(x, x[:, :256], x[:, :256], cp)
        elif here.rank == 1 or how == "shorter":
            tr.attention(x, x, x, cp, mask=PACK, layout=layouts[how])
        else:
            tr.attention(x, x, x, cp, mask=PACK, layout=cp.layout_for(LENGTH, PACK))
        said = ""
    except (ConfigurationError, Disagreement) as error:
        said = str(error)
    part = tr.shard(whole, cp, mask=PACK)
    return said, str(tr.attention(part, part, part, cp, mask=PACK).abs().max().item())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("not cut", "no tensor of 1024 positions was cut by mask causal&documents"),
        ("cut by another mask", "no tensor of 1024 positions was cut by mask window"),
        ("no mask", 'layout "auto" cuts a sequence by its mask'),
        ("of two lengths", "is for q and kv of one sequence"),
        ("shorter", "is for 1 ranks and 64 positions"),
        ("a text", "rank 1 refused: layout is of type str"),
    ],
)
def test_what_is_not_known_is_refused(how: str, says: str, ranks: RankPools) -> None:
    """On every rank at once, and the next call works."""
    for said, after in ranks(2)(refused, how):
        assert says in said or (how == "a text" and "layout is of type str" in said), said
        assert after == "0.0"


def other_layouts(here: Here) -> str:
    """Rank 1 gives another layout than rank 0."""
    cp = here.cp(schedule="ring")
    x = torch.zeros(1, LENGTH // here.world_size, HEADS, DIM)
    chosen = cp.layout_for(LENGTH) if here.rank else here.cp(schedule="ring", layout="auto").layout_for(LENGTH, PACK)
    with pytest.raises(ConfigurationError) as caught:
        tr.attention(x, x, x, cp, mask=PACK, layout=chosen)
    return str(caught.value)


def test_a_mesh_that_was_given_counts() -> None:
    """Of a full mesh the busiest link decides; of a switch, or where nothing was given, the port."""
    long = 16384
    mask = tr.Causal() & tr.Documents([0, 700, 900, 5000, 5300, 5400, 9400, 9500, 12000, 12100, 13000, long])
    found = [Cuts(8, topology).of(long, mask) for topology in (None, switch(8, 10.0), full_mesh(8, 10.0))]
    assert found[0] == found[1] != found[2]
    assert found[2] == balanced_layout(mask, long, 8, links=7)


def other_topologies(here: Here) -> str:
    """Rank 0 alone was told of a mesh, by which its layouts are others."""
    long, cp = 16384, here.cp(layout="auto", topology=full_mesh(here.world_size, 10.0) if here.rank == 0 else None)
    mask = tr.Causal() & tr.Documents([0, 700, 900, 5000, 5300, 5400, 9400, 9500, 12000, 12100, 13000, long])
    part = tr.shard(torch.arange(long)[None], cp, mask=mask)
    with pytest.raises(ConfigurationError) as caught:
        tr.unshard(part, cp, mask=mask)
    return str(caught.value)


def test_parts_cut_for_other_fabrics_are_not_put_together(ranks: RankPools) -> None:
    for said in ranks(4)(other_topologies):
        assert "ports of 3 links" in said and "ports of 1 links" in said, said


def test_ranks_with_different_layouts_are_told(ranks: RankPools) -> None:
    for said in ranks(2)(other_layouts):
        assert "layout of the call: rank 0: 'balanced'" in said and "rank 1: 'zigzag'" in said, said


def test_names_as_before() -> None:
    with pytest.raises(ConfigurationError, match="unknown layout 'automatic'"):
        tr.ContextParallel("self", layout="automatic")
    cp = tr.ContextParallel("self", layout="auto")
    x = torch.randn(1, 64, 2, 8)
    assert torch.equal(tr.shard(x, cp, mask="causal"), x)
    assert tr.attention(x, x, x, cp, is_causal=True).shape == x.shape


def mixed_up(here: Here) -> list[str]:
    """What is said of parts put together by another mask, or by ranks that name different ones; then of a call."""
    cp = here.cp(schedule="ring", layout="auto")
    other = tr.Causal() & tr.Documents([0, 500, 600, 1024])
    whole = torch.randn(1, LENGTH, HEADS, DIM)
    part, said = tr.shard(whole, cp, mask=PACK), []
    mine = cp.layout_for(LENGTH, PACK) if here.rank else cp.layout_for(LENGTH, other)
    calls: list[Callable[[], object]] = [
        lambda: tr.unshard(part, cp, mask=other),
        lambda: tr.unshard(part, cp, layout=mine),
        lambda: tr.unshard(part, cp, layout="zigzag"),  # type: ignore[arg-type]
        lambda: tr.attention(part, part, part, cp, mask=other),
    ]
    for each in calls:
        with pytest.raises((ConfigurationError, Disagreement)) as caught:
            each()
        said.append(str(caught.value))
    assert tr.unshard(part, cp, mask=PACK).shape == whole.shape
    return said


def test_parts_of_one_mask_are_not_put_together_by_another(ranks: RankPools) -> None:
    """Nor does asking for it make a call of that mask right."""
    for by_other, by_different, by_text, called in ranks(2)(mixed_up):
        assert "no tensor was cut by mask" in by_other
        assert "parts of one shape, dtype and dim" in by_different
        assert "layout is of type str" in by_text
        assert "no tensor of 1024 positions was cut by mask" in called


def named_on_one_rank(here: Here) -> list[float]:
    """Calls in which rank 1 gives the layout that rank 0 takes by itself, planned anew and not."""
    cp, found = here.cp(schedule="auto", layout="auto"), []
    mask = tr.SlidingWindow(40)
    q, dout = torch.randn(1, LENGTH, 2, DIM, generator=torch.Generator().manual_seed(1)), torch.ones(1, LENGTH, 2, DIM)
    want = attention64(q, q, q, dout, allowed(mask, LENGTH, LENGTH))
    part = tr.shard(q, cp, mask=mask)
    for given in (False, True, False):
        layout = cp.layout_for(LENGTH, mask) if given and here.rank else None
        out = tr.attention(part, part, part, cp, mask=mask, layout=layout)
        found.append(relative_error(out, tr.shard(want.out, cp, mask=mask)))
    return found


def test_a_layout_that_is_named_is_the_same_as_one_that_is_taken(ranks: RankPools) -> None:
    assert max(map(max, ranks(2)(named_on_one_rank))) < 2e-6


def uneven(here: Here) -> list[float]:
    """Calls of lengths that parts do not tell: each rank takes that which it sharded last, wrongly on one of them."""
    cp, found = here.cp(schedule="ring", layout="auto"), []
    for length in (10, 9):
        q = torch.randn(1, length, 2, DIM, generator=torch.Generator().manual_seed(length))
        want = attention64(q, q, q, torch.ones_like(q), allowed(tr.Causal(), length, length))
        found.append((tr.shard(q, cp, mask="causal"), tr.shard(want.out, cp, mask="causal")))
    return [relative_error(tr.attention(part, part, part, cp, is_causal=True), out) for part, out in found]


def test_any_length(ranks: RankPools) -> None:
    assert max(map(max, ranks(2)(uneven))) < 2e-6


def limited(here: Here) -> list[str]:
    """A memory limit on rank 0 alone; two packs of one shape."""
    limit = 10**9 if here.rank == 0 else None
    cp = tr.ContextParallel(layout="contiguous", transport="gloo", memory_limit_bytes=limit)
    part, reasons = torch.zeros(1, LENGTH // here.world_size, HEADS, DIM), []
    with cp:
        for end in (500, 501):
            mask = tr.Causal() & tr.Documents([0, end, LENGTH])
            tr.attention(part, part, part, cp, mask=mask)
            reasons.append(tr.plan(part, part, part, cp, mask).reason)
    return reasons


def test_a_memory_limit_of_one_rank_does_not_part_them(ranks: RankPools) -> None:
    """Rank 0 says whether its plan serves other packs: with a limit each is planned."""
    assert all(LIKE_BEFORE not in reason for reasons in ranks(2)(limited) for reason in reasons)
