"""Each kind of mask as a call may be given it: itself, its text, and under torch.compile, where no graph breaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_kinds import KINDS, Kind, kind

import tokenring as tr
from tokenring.errors import ConfigurationError

ALONE = tr.ContextParallel()
MADE = {name: kind(name, 16, 1, {"later start": 32, "cross-attention": 24}.get(name)) for name in KINDS}
Tensors = tuple[torch.Tensor, ...]


def inputs(made: Kind) -> Tensors:
    random = torch.Generator().manual_seed(1)
    sizes = (made.q_length, 4), (made.kv_length, 2), (made.kv_length, 2)
    q, k, v = (torch.randn(1, *size, 8, generator=random).requires_grad_() for size in sizes)
    return q, k, v


def results(call: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """out, dq, dk, dv."""
    out = call(q, k, v)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))


def compiled(call: Callable[..., torch.Tensor], *operands: torch.Tensor) -> Tensors:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own parts
        import torch._dynamo as dynamo

        dynamo.reset()
        made: Any = torch.compile(call, backend="aot_eager", fullgraph=True)
        found = results(made, *operands)
        dynamo.reset()
    return found


def equal(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_itself_its_text_and_compiled(name: str) -> None:
    made = MADE[name]
    mask, text, qkv = made.mask, str(made.mask), inputs(made)
    expected = results(lambda q, k, v: tr.attention(q, k, v, ALONE, mask), *qkv)
    assert equal(results(lambda q, k, v: tr.attention(q, k, v, ALONE, text), *qkv), expected)
    assert equal(compiled(lambda q, k, v: tr.attention(q, k, v, ALONE, mask), *qkv), expected)


def test_a_text_in_a_graph() -> None:
    made, text = MADE["images in a text"], str(MADE["images in a text"].mask)
    found = compiled(lambda q, k, v: tr.attention(q, k, v, ALONE, text), *inputs(made))
    assert equal(found, results(lambda q, k, v: tr.attention(q, k, v, ALONE, text), *inputs(made)))


MAKERS: dict[str, Callable[[], tr.Mask]] = {
    "prefix": lambda: tr.PrefixLM(5),
    "blocks and a later start": lambda: tr.BlockCausal(4).with_q_start(3),
    "images": lambda: tr.Causal() | tr.Bidirectional([(3, 6), (8, 10)]),
    "chunks": lambda: tr.Chunks(8) & tr.Causal() & tr.Documents([0, 5, 9]),
    "tree": lambda: tr.PrefixTree([4, 3, 2, 5], [None, 0, 0, 2]),
    "slices": lambda: tr.Slices([(0, 4, 0, 4), (4, None, 0, None, None, 0)]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_made_inside_a_graph(name: str) -> None:
    made, make = Kind(tr.Full(), 16, 16, lambda i, j: True), MAKERS[name]
    found = compiled(lambda q, k, v: tr.attention(q, k, v, ALONE, make()), *inputs(made))
    assert equal(found, results(lambda q, k, v: tr.attention(q, k, v, ALONE, make()), *inputs(made)))


def test_masks_in_turn_in_one_graph() -> None:
    """Their numbers are arguments of the operator, so that a graph is never of another mask."""
    made = Kind(tr.Full(), 16, 16, lambda i, j: True)
    masks = [tr.Bidirectional([(a, a + 4), (9, b)]) | tr.Causal() for a, b in ((1, 12), (2, 13), (3, 12), (1, 15))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo as dynamo

        dynamo.reset()

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: tr.Mask) -> torch.Tensor:
            return tr.attention(q, k, v, ALONE, mask)

        call: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            for mask in masks:
                q, k, v = inputs(made)
                assert torch.equal(call(q, k, v, mask), function(q, k, v, mask))
        dynamo.reset()


@pytest.mark.parametrize(
    ("mask", "agrees"),
    [(tr.PrefixTree([4, 3, 9], [None, 0, 0]), True), (tr.Causal() & tr.Chunks(4), True), (tr.PrefixLM(4), False)],
)
def test_is_causal(mask: tr.Mask, agrees: bool) -> None:
    x = torch.randn(1, 16, 1, 8)
    assert torch.equal(tr.attention(x, x, x, ALONE, mask, is_causal=agrees), tr.attention(x, x, x, ALONE, mask))
    with pytest.raises(ConfigurationError, match=f"is_causal={not agrees} and mask .* say different things"):
        tr.attention(x, x, x, ALONE, mask, is_causal=not agrees)
