"""Masks that compiled graphs take by one number: a graph serves packs of any number of documents."""

from __future__ import annotations

import gc

import pytest
import torch

import tokenring as tr
from tokenring.api import compiled
from tokenring.api.compiled import with_number
from tokenring.errors import ConfigurationError

PACKS = [(0, 24), (0, 5, 24), (0, 3, 9, 24), (0, 1, 2, 3, 24), (0, 12, 20, 24), tuple(range(0, 25, 2))]


def graphs(masks: list[tr.Mask]) -> int:
    """Count the graphs that are compiled for calls with these masks, all of which are those of eager calls."""
    from torch._dynamo.testing import CompileCounterWithBackend  # seconds, of whoever collects this module

    torch._dynamo.reset()
    cp = tr.ContextParallel("self")
    q, k, v = (torch.randn(1, 24, 2, 8, requires_grad=True) for _ in range(3))

    def call(mask: tr.Mask) -> torch.Tensor:
        return tr.attention(q, k, v, cp, mask)

    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(call, backend=counter, fullgraph=True)
    for mask in masks:
        found, wanted = made(mask), call(mask)
        assert torch.equal(found, wanted)
        for one, two in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, wanted)), strict=True):
            assert torch.equal(one, two)
    torch._dynamo.reset()
    return counter.frame_count


def test_one_graph_for_any_number_of_documents() -> None:
    """One more where the number first changes; without numbers one for each length."""
    masks = [tr.Causal() & tr.Documents(ends) for ends in PACKS]
    assert graphs([with_number(mask) for mask in masks]) <= 2
    assert graphs(masks) > 2


def test_masks_of_many_slices_have_numbers_too() -> None:
    masks = [(tr.Causal() & tr.Documents(ends)) | tr.SlidingWindow(2, 0) for ends in PACKS[:3]]
    assert masks[1].numbers is not None
    assert graphs([with_number(mask) for mask in masks]) <= 2


def test_it_is_the_same_mask() -> None:
    mask = tr.Causal() & tr.Documents(PACKS[2])
    first, second = with_number(mask), with_number(mask)
    assert first == mask == second and hash(first) == hash(mask) and str(first) == str(mask)
    assert not hasattr(mask, compiled.NUMBER) and getattr(first, compiled.NUMBER) != getattr(second, compiled.NUMBER)


def test_a_mask_that_somebody_holds_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_MASKS", 2)
    mask = with_number(tr.Causal())
    for _ in range(5):
        with_number(tr.Full())
    assert compiled._mask_numbered(getattr(mask, compiled.NUMBER)) is mask
    assert graphs([mask]) == 1


def test_a_number_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass of a batch after so many others; and no more masks are kept than that."""
    monkeypatch.setattr(compiled, "MOST_MASKS", 2)
    q, cp = torch.randn(1, 6, 2, 8, requires_grad=True), tr.ContextParallel("self")
    made = torch.compile(lambda mask: tr.attention(q, q, q, cp, mask), backend="aot_eager")
    torch.autograd.backward(tr.attention(q, q, q, cp, tr.Causal()).sum())  # what is made for such calls holds its mask
    mask = with_number(tr.Causal())
    number, out = getattr(mask, compiled.NUMBER), made(mask)
    torch._dynamo.reset()  # guards of the graph
    del mask
    with_number(tr.Full())
    assert compiled._mask_numbered(number) == tr.Causal()
    for _ in range(2):
        with_number(tr.Full())
    gc.collect()
    assert len(compiled._last_numbered) == 2
    with pytest.raises(ConfigurationError, match="gone: 2 masks were made since, and nobody holds it"):
        torch.autograd.backward(out.sum())
