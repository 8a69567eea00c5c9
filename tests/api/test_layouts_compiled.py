"""layout=... in compiled and captured calls: layers whose mask is not that by which their tensors were cut."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools
from test_capture import GraphDevice
from test_capture import device as device  # a fixture
from test_compile import CALL_SECONDS, compiler

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.runtime.agreement import Disagreement
from tokenring.sequence.layout import Layout, layout_numbered, zigzag

LENGTH, HEADS, KV_HEADS, DIM = 1024, 4, 2, 16
ENDS = [(20, 350, 380, 450, 950), (500, 520, 530, 700, 900), (100, 110, 120, 800, 1000), (3, 40, 300, 310, 900)]
PACKS = [tr.Causal() & tr.Documents([0, *ends, LENGTH]) for ends in ENDS]
WINDOW = tr.SlidingWindow(99, 0)
Tensors = tuple[torch.Tensor, ...]


def tensors(seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, LENGTH, heads, DIM, generator=random) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))


def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, mask: tr.Mask, layout: Layout) -> Tensors:
    return tr.attention(q, k, v, cp, mask, return_lse=True, layout=layout)


def of_packs(here: Here) -> tuple[list[float], int]:
    """Errors of out and gradients of a window's layer, for one pack after another; how many graphs were compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    cp, found = here.cp(schedule="ring", layout="auto"), []
    with compiler():
        counter = CompileCounterWithBackend("aot_eager")
        made = torch.compile(layer, backend=counter, fullgraph=True)
        for seed, pack in enumerate(PACKS):
            layout, mask = cp.layout_for(LENGTH, pack), pack & WINDOW
            q, k, v, dout = tensors(seed)
            want = attention64(q, k, v, dout, allowed(mask, LENGTH, LENGTH))
            parts = [tr.shard(x, cp, layout=layout).requires_grad_() for x in (q, k, v)]
            out, _ = made(parts[0], parts[1], parts[2], cp, mask, layout)
            torch.autograd.backward(out, tr.shard(dout, cp, layout=layout))
            for x, right in zip((out, *(part.grad for part in parts)), (want.out, *want[2:]), strict=False):
                assert x is not None
                found.append(relative_error(x.detach(), tr.shard(right, cp, layout=layout)))
    return found, counter.frame_count


def test_new_packs_are_no_new_graphs(ranks: RankPools) -> None:
    """The second one makes numbers of the graph variables; no more are compiled."""
    for found, graphs in ranks(2).within(CALL_SECONDS, of_packs):
        assert len(found) == 4 * len(PACKS) and max(found) < 5e-6, found
        assert graphs == 2


def wrong(here: Here) -> list[str]:
    """What compiled calls say of layouts that cannot be, or that differ; then of a good one."""
    cp, said = here.cp(schedule="ring"), []
    q, k, v, _ = (tr.shard(x, cp) for x in tensors(0))
    contiguous = tr.ContextParallel("self").layout_for(64)
    unlike = zigzag(here.world_size, LENGTH, 1 + here.rank)
    with compiler():
        made: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for layout in ("zigzag", contiguous, unlike, zigzag(here.world_size, LENGTH)):
            try:
                made(q, k, v, cp, PACKS[0], layout)
                said.append("")
            except (ConfigurationError, Disagreement) as error:
                said.append(str(error))
    return said


def test_what_cannot_be_is_refused_on_all_ranks(ranks: RankPools) -> None:
    for of_text, of_another_length, that_differ, good in ranks(2).within(CALL_SECONDS, wrong):
        assert "layout is of type str; give a Layout, or none: that of cp" in of_text
        assert "is for 1 ranks and 64 positions" in of_another_length
        assert "layout of the call: rank 0: " in that_differ
        assert good == ""


def test_numbers() -> None:
    """Each layout has its own, copies too; one that is gone is refused."""
    first = zigzag(2, LENGTH)
    others = [zigzag(2, LENGTH), copy.deepcopy(first), copy.copy(first), replace(first)]
    others.append(pickle.loads(pickle.dumps(first)))
    assert all(each == first and hash(each) == hash(first) for each in others)
    assert len({each.number for each in (first, *others)}) == 1 + len(others)
    assert all(layout_numbered(each.number) is each for each in (first, *others))
    cp, number = tr.ContextParallel("self"), others.pop().number
    gc.collect()
    assert layout_numbered(number) is None
    with pytest.raises(ConfigurationError, match=f"layout number {number} of this process, which is gone"):
        cp.cuts.numbered(number)
    gone = first.number
    assert cp.cuts.numbered(gone) is first
    del first
    gc.collect()
    assert cp.cuts.numbered(gone).number == gone  # for the backward pass


@pytest.mark.parametrize("give", [lambda layout: layout, lambda layout: None], ids=["given", "taken"])
def test_captured(give: Callable[[Layout], Layout | None], device: GraphDevice) -> None:
    """In a layout of its own a call is another one than in that of cp; results are those of the eager call."""
    cp = tr.ContextParallel(schedule="ring", layout="auto")
    layout = cp.layout_for(LENGTH, PACKS[0])
    q, k, v, dout = tensors(1)
    tr.shard(q, cp, mask=PACKS[0])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    made = tr.capture(q, k, v, cp, PACKS[0], layout=give(layout))
    found, right = (
        [out.detach().clone(), *torch.autograd.grad(out, leaves, dout)]
        for out in (made(q, k, v)[0], tr.attention(q, k, v, cp, PACKS[0], layout=give(layout)))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_captured_layouts_are_checked(device: GraphDevice) -> None:
    cp = tr.ContextParallel(schedule="ring")
    q, k, v, _ = tensors(1)
    for layout, says in (("zigzag", "layout is of type str"), (zigzag(1, 64), "layout 'zigzag' gives rank 0 64 of")):
        with pytest.raises(ConfigurationError, match=says):
            tr.capture(q, k, v, cp, PACKS[0], layout=layout)  # type: ignore[arg-type]
