"""The order of a call's axes: [B, H, T, D] where it is said, and a word where it seems to be meant."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools
from test_capture import GraphDevice, inputs
from test_capture import device as device  # a fixture

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel, TokenRingWarning, attention, plan, shard
from tokenring.api import inputs as order

CALL_SECONDS = 110.0  # with the import of the compiler
LENGTH, HEADS, DIM = 24, (4, 2), 8
ALONE = ContextParallel(layout="contiguous")


@pytest.fixture(autouse=True)
def not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order.SWAPPED, "said", False)


# ---------- as it is said


def swapped(here: Here, backend: str | None) -> tuple[list[float], bool]:
    """The errors of out and the gradients in the order of scaled_dot_product_attention; whether lse and bits agree."""
    cp = here.cp(layout="zigzag", schedule="tokenring")
    generator = torch.Generator().manual_seed(1)
    counts = HEADS[0], HEADS[1], HEADS[1], HEADS[0]
    whole = [torch.randn(2, LENGTH, count, DIM, generator=generator) for count in counts]
    q, k, v, dout = (shard(x.transpose(1, 2).contiguous(), cp, dim=2) for x in whole)
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(q, k, v, cp, tr.Causal(), return_lse=True, order="bhtd")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if backend else "error")
        call = torch.compile(attend, backend=backend, fullgraph=True) if backend else attend
        out, lse = call(*leaves)
        made = out, *torch.autograd.grad(out, leaves, dout)
    all_q, all_k, all_v, all_dout = whole
    right = attention64(all_q, all_k, all_v, all_dout, allowed(tr.Causal(), LENGTH, LENGTH))
    wanted = [shard(x, cp).transpose(1, 2) for x in (right.out, right.dq, right.dk, right.dv)]
    q, k, v = (x.detach().transpose(1, 2).contiguous() for x in leaves)
    plain, plain_lse = attention(q, k, v, cp, tr.Causal(), return_lse=True)
    same = torch.equal(out, plain.transpose(1, 2)) and torch.equal(lse, plain_lse)
    return [relative_error(x.detach(), y) for x, y in zip(made, wanted, strict=True)], same


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_heads_first(world_size: int, backend: str | None, ranks: RankPools) -> None:
    for errors, same in ranks(world_size).within(CALL_SECONDS, swapped, backend):
        assert max(errors) < 5e-6 and same


def test_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads q, k, v and dout where they lie, and out is a view of what it made."""
    seen: list[int] = []
    kernel = ALONE.kernel(torch.device("cpu"))
    forward, backward = type(kernel).forward, type(kernel).backward

    def note(function: Any) -> Any:
        def noted(self: object, *operands: Any, **options: Any) -> Any:
            seen.extend(x.data_ptr() for x in operands if isinstance(x, torch.Tensor))
            return function(self, *operands, **options)

        return noted

    monkeypatch.setattr(type(kernel), "forward", note(forward))
    monkeypatch.setattr(type(kernel), "backward", note(backward))
    q, k, v, dout = (torch.randn(1, 2, 16, 8) for _ in range(4))
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out = attention(*leaves, ContextParallel(), order="bhtd")
    torch.autograd.grad(out, leaves, dout)
    assert {x.data_ptr() for x in (q, k, v, dout)} <= set(seen)
    assert out.shape == q.shape and out._base is not None and out._base.shape == (1, 16, 2, 8)


def test_in_place_and_autocast() -> None:
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    out = attention(q, q, q, ALONE, order="bhtd")
    out *= 2
    (made,) = torch.autograd.grad(out.square().sum(), q)
    (right,) = torch.autograd.grad(4 * attention(q, q, q, ALONE, order="bhtd").square().sum(), q)
    torch.testing.assert_close(made, right)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, q, q, ALONE, order="bhtd").dtype == torch.bfloat16


def test_plan() -> None:
    x = torch.zeros(1, 2, 16, 8)
    workload = plan(x, x, x, ALONE, order="bhtd").workload
    assert (workload.q_length, workload.q_heads) == (16, 2)


def test_captured_calls(device: GraphDevice) -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs(1)[:3])
    out, lse = tr.capture(q, k, v, ALONE, order="bhtd")(q, k, v)
    right, right_lse = attention(q, k, v, ALONE, order="bhtd", return_lse=True)
    assert torch.equal(out, right) and torch.equal(lse, right_lse)


@pytest.mark.parametrize("said", ["BHTD", "bdht", "", 3, True])
def test_others_are_refused(said: Any) -> None:
    x = torch.zeros(1, 2, 16, 8)
    for call in (attention, plan):
        with pytest.raises(ConfigurationError) as caught:
            call(x, x, x, ALONE, order=said)
        assert str(caught.value) == (
            f"order={said!r}: write 'bthd' for q, k and v as [B, T, H, D], or 'bhtd' for [B, H, T, D]"
        )


def test_what_is_no_such_tensor_is_still_said() -> None:
    x = torch.zeros(2, 16, 8)
    for given, says in ((x, "attention expects q, k and v as [B, T, H, D]"), ([1], "one is of type list")):
        with pytest.raises(ConfigurationError, match=says.replace("[", r"\[")):
            attention(given, given, given, ALONE, order="bhtd")  # type: ignore[call-overload]


# ---------- as it seems to be meant

SAYS = (
    "q{} is read as [B, T, H, D], this rank's tokens before heads, and looks like [B, H, T, D], the order of "
    "scaled_dot_product_attention: say order='bhtd' if it is that, or order='bthd' if it is not"
)


def told(*shapes: tuple[int, int], said: Any = None, call: Any = attention) -> list[str]:
    """What calls with q and k of such axes 1 and 2 warn of."""
    q, k = (torch.zeros(1, *shape, 8) for shape in (shapes[0], shapes[-1]))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            call(q, k, k, ALONE, order=said)
    assert all(each.filename == __file__ for each in heard)  # where the call is
    assert all(issubclass(each.category, TokenRingWarning) for each in heard)
    return [str(each.message) for each in heard]


@pytest.mark.parametrize("shape", [(2, 128), (8, 256), (32, 4096), (128, 129)])
def test_one_warning(shape: tuple[int, int]) -> None:
    for call in (attention, plan):
        order.SWAPPED.said = False
        assert told(shape, call=call) == [SAYS.format(f" [1, {shape[0]}, {shape[1]}, 8]")]
        assert told((4, 200), call=call) == []  # once in a process


def test_grouped_heads() -> None:
    assert told((8, 256), (2, 256)) == [SAYS.format(" [1, 8, 256, 8]")]


@pytest.mark.parametrize("shape", [(128, 2), (4096, 32), (128, 128), (8, 16), (2, 127), (16, 64)])
def test_no_warning(shape: tuple[int, int]) -> None:
    assert told(shape) == []


def test_no_warning_where_few_tokens_meet_many_query_heads() -> None:
    assert told((64, 128), (64, 8)) == []


@pytest.mark.parametrize("said", ["bthd", "bhtd"])
def test_no_warning_where_the_order_is_said(said: str) -> None:
    assert told((8, 256), said=said) == []


def test_an_error_where_warnings_are() -> None:
    x = torch.zeros(1, 8, 256, 8)
    for _ in range(2):
        with pytest.raises(TokenRingWarning):
            attention(x, x, x, ALONE)


def test_what_is_refused_says_only_that() -> None:
    q, k = torch.zeros(1, 8, 256, 8), torch.zeros(1, 2, 256, 8)
    with pytest.raises(tr.UnsupportedError, match="only Full takes both"):
        attention(q, k, k, ALONE, tr.Causal())


def in_graphs(here: Here, backend: str) -> list[str]:
    heard: list[str] = []
    for said in (None, "bthd", "bhtd"):
        order.SWAPPED.said = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch._dynamo.reset()
            call = torch.compile(attention, backend=backend, fullgraph=True)
            for tokens in (256, 320, 384):  # sizes become variables
                x = torch.zeros(1, 4, tokens, 8)
                call(x, x, x, here.base, order=said)
        heard += [f"{said}: {each.message}" for each in caught if issubclass(each.category, TokenRingWarning)]
    return heard


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_warn_too(backend: str, ranks: RankPools) -> None:
    """Sizes of a graph may be variables, and are not said."""
    assert ranks(1).within(CALL_SECONDS, in_graphs, backend) == [[f"None: {SAYS.format('')}"]]
