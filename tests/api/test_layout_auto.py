"""layout="auto": the sequence is cut by its mask; a call knows how its tensors were cut, or is refused on all ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.planner.layouts.balanced import NAME
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


def test_ranks_with_different_layouts_are_told(ranks: RankPools) -> None:
    for said in ranks(2)(other_layouts):
        assert "layout: rank 0: 'balanced'" in said and "rank 1: 'zigzag'" in said, said


def test_names_as_before() -> None:
    with pytest.raises(ConfigurationError, match="unknown layout 'automatic'"):
        tr.ContextParallel("self", layout="automatic")
    cp = tr.ContextParallel("self", layout="auto")
    x = torch.randn(1, 64, 2, 8)
    assert torch.equal(tr.shard(x, cp, mask="causal"), x)
    assert tr.attention(x, x, x, cp, is_causal=True).shape == x.shape
