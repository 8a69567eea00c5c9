"""Linear layers and collectives as models call them: what ranks must give alike, and what only some of them want."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import relative_error
from patience import patient
from ranks import PEER_SECONDS, Here, RankPools
from torch.utils.checkpoint import checkpoint

import tokenring as tr
from tokenring.backends.interfaces import Transport

Call = Callable[[tr.TensorParallel], object]
WEIGHT = torch.ones(2, 8)


def transport_of(here: Here) -> Transport:
    assert here.base.transport is not None
    return here.base.transport


def of_x(*shape: int) -> Call:
    return lambda tp: tr.column_linear(torch.ones(shape), WEIGHT, tp)


def of_h(*shape: int, wide: int = 3) -> Call:
    return lambda tp: tr.row_linear(torch.ones(shape), torch.ones(wide, shape[2]), tp)


def recorded(tp: tr.TensorParallel, x: bool, weight: bool) -> object:
    return tr.column_linear(torch.ones(1, 2, 8).requires_grad_(x), WEIGHT.clone().requires_grad_(weight), tp)


# What rank 0 calls, what rank 1 does, and what both hear.
DIFFER: dict[str, tuple[Call, Call, str]] = {
    "lengths of one padded size": (
        partial(tr.all_reduce, torch.ones(3)), partial(tr.all_reduce, torch.ones(4)), "shape: rank 0: [3]; rank 1: [4]"
    ),
    "all_reduce of as many elements": (
        partial(tr.all_reduce, torch.ones(2, 3)), partial(tr.all_reduce, torch.ones(3, 2)), "rank 1: [3, 2]"
    ),
    "reduce_scatter of as many elements": (
        partial(tr.reduce_scatter, torch.ones(4, 1)), partial(tr.reduce_scatter, torch.ones(2, 2)), "rank 1: [2, 2]"
    ),
    "all_gather of as many elements": (
        partial(tr.all_gather, torch.ones(4, 1)), partial(tr.all_gather, torch.ones(2, 2)), "rank 1: [2, 2]"
    ),
    "collectives of one pass": (
        partial(tr.all_reduce, torch.ones(2, 2)),
        partial(tr.reduce_scatter, torch.ones(2, 2)),
        "call: rank 0: all_reduce; rank 1: reduce_scatter",
    ),
    "a collective and a layer": (partial(tr.all_reduce, torch.ones(2)), of_x(1, 2, 8), "rank 1: column_linear"),
    "batches of as many tokens": (of_x(2, 2, 8), of_x(1, 4, 8), "x: rank 0: [2, 2, 8]; rank 1: [1, 4, 8]"),
    "batches of a row layer": (of_h(2, 4, 2), of_h(1, 8, 2), "h: rank 0: [2, 4, 2]; rank 1: [1, 8, 2]"),
    "widths of a row layer": (of_h(1, 4, 2), of_h(1, 4, 2, wide=5), "weight: rank 0: [3, 2]; rank 1: [5, 2]"),
    "dtypes": (
        partial(tr.all_reduce, torch.ones(3)), partial(tr.all_reduce, torch.ones(3).bfloat16()),
        "dtype: rank 0: torch.float32; rank 1: torch.bfloat16",
    ),
    "who records": (
        partial(recorded, x=True, weight=True), torch.no_grad()(partial(recorded, x=True, weight=True)),
        "gradients of: rank 0: x and weight; rank 1: none",
    ),
    "what is frozen": (
        partial(recorded, x=True, weight=True), partial(recorded, x=True, weight=False),
        "gradients of: rank 0: x and weight; rank 1: x",
    ),
}  # fmt: skip


def differing(here: Here, what: str, transport: str) -> str:
    with tr.TensorParallel(transport=here.transport(transport) or "auto") as tp:
        with pytest.raises(tr.ConfigurationError) as caught:
            DIFFER[what][:2][here.rank](tp)
        assert tr.all_reduce(torch.ones(4), tp).equal(torch.full((4,), 2.0))  # the group lives on
        return str(caught.value)


@pytest.mark.parametrize("transport", ("shm", "gloo"))
@pytest.mark.parametrize("what", DIFFER)
def test_ranks_that_differ(ranks: RankPools, what: str, transport: str) -> None:
    assert all(DIFFER[what][2] in text for text in ranks(2)(differing, what, transport))


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "stays": ({"stays": "tokens"}, "stays: rank 0: weights; rank 1: tokens"),
    "partials": ({"partials": torch.float32}, "partials: rank 0: as the tensors; rank 1: torch.float32"),
    "schedule": ({"schedule": "tokenring"}, "schedule: rank 0: direct-q; rank 1: tokenring"),
}


def otherwise(here: Here, what: str) -> str:
    options = OPTIONS[what][0] if here.rank == 1 else {}
    with tr.TensorParallel(transport=transport_of(here), **options) as tp:
        with pytest.raises(tr.ConfigurationError) as caught:
            of_x(1, 2, 8)(tp)
        return str(caught.value)


@pytest.mark.parametrize("what", OPTIONS)
def test_contexts_that_differ(ranks: RankPools, what: str) -> None:
    assert all(OPTIONS[what][1] in text for text in ranks(2)(otherwise, what))


def without_memory(here: Here) -> tuple[str, int | None, bool]:
    """What a rank hears when rank 1 cannot bind the second pass of an all-reduce."""

    def bound(request: object, direction: str, transport: object) -> Any:
        if here.rank == 1 and direction == "backward":
            raise RuntimeError("no memory is left")
        return executors(request, direction, transport)

    with tr.TensorParallel(transport="gloo", timeout_seconds=patient(PEER_SECONDS)) as tp:
        executors: Any = tp._executors
        bound.cache_clear = executors.cache_clear  # type: ignore[attr-defined]
        tp._executors = bound  # type: ignore[assignment]
        with pytest.raises(RuntimeError) as caught:
            tr.all_reduce(torch.ones(4), tp)
    found = caught.value
    return str(found), getattr(found, "rank", None), getattr(found, "certain", False)


def test_both_passes_are_bound_before_the_first_begins(ranks: RankPools) -> None:
    """The others need not wait for the limit: they are told."""
    heard, own = ranks(2)(without_memory)
    assert own[0] == "no memory is left"
    assert heard[1:] == (1, True) and "no memory is left" in heard[0]


# ---------- gradients that are not wanted


def half(here: Here, schedule: str, x: bool) -> tuple[list[dict[str, torch.Tensor]], list[dict[int, int]]]:
    """Gradients of both layers where only inputs want one, or only weights; and of all, with the bytes sent."""
    random = torch.Generator().manual_seed(here.rank)
    transport, made, sent = transport_of(here), [], []
    with tr.TensorParallel(schedule=schedule, transport=transport) as tp:
        shapes: dict[str, tuple[int, ...]] = {"x": (2, 3, 8), "w1": (4, 8), "h": of_shape(tp), "w2": (8, 4)}
        given = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
        for wanted in ((x, not x), (True, True)):
            flags = {"x": wanted[0], "h": wanted[0], "w1": wanted[1], "w2": wanted[1]}
            of = {name: each.clone().requires_grad_(flags[name]) for name, each in given.items()}
            for name, each in of.items():
                if "w" in name:
                    each.main_grad = torch.zeros_like(each)  # type: ignore[attr-defined]
            h, y = tr.column_linear(of["x"], of["w1"], tp), tr.row_linear(of["h"], of["w2"], tp)
            transport.sent_bytes.clear()
            torch.autograd.backward((h, y), (torch.ones_like(h), torch.ones_like(y)))
            sent.append(dict(transport.sent_bytes))
            grads = {name: each.grad for name, each in of.items() if each.grad is not None}
            made.append(grads | {name: of[name].main_grad for name in ("w1", "w2")})  # type: ignore[attr-defined]
    return made, sent


def of_shape(tp: tr.TensorParallel) -> tuple[int, int, int]:
    return (2, 3, 4 * tp.world_size) if tp.schedule == "ring" else (2, 3 * tp.world_size, 4)


@pytest.mark.parametrize("x", (True, False), ids=("weights are frozen", "inputs are data"))
@pytest.mark.parametrize("schedule", ("direct-q", "ring"))
def test_only_wanted_gradients_are_computed(ranks: RankPools, schedule: str, x: bool) -> None:
    """They are those of the whole pass; nothing moves for the others, and a frozen weight's main_grad stays."""
    for made, sent in ranks(2)(half, schedule, x):
        (some, all_of), (less, most) = made, sent
        wanted = {"x", "h"} if x else {"w1", "w2"}
        assert all(some[name].equal(all_of[name]) for name in wanted)
        assert set(some) - wanted == {"w1", "w2"} - wanted
        assert not any(some[name].any() for name in set(some) - wanted)
        assert sum(less.values()) < sum(most.values())


# ---------- main_grad under what wraps saved tensors

WRAPPERS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "checkpoint": lambda call, x: checkpoint(call, x, use_reentrant=False),
    "reentrant checkpoint": lambda call, x: checkpoint(call, x, use_reentrant=True),
    "save_on_cpu": lambda call, x: saved_on_cpu(call, x),
}


def saved_on_cpu(call: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return call(x)


@pytest.mark.parametrize("name", WRAPPERS)
def test_main_grad_where_saved_tensors_are_others(name: str) -> None:
    with tr.TensorParallel("self") as tp:
        w1, w2 = torch.ones(4, 8, requires_grad=True), torch.ones(8, 4, requires_grad=True)
        for each in (w1, w2):
            each.main_grad = torch.zeros_like(each)  # type: ignore[attr-defined]
        x = torch.ones(1, 2, 8, requires_grad=True)
        y = WRAPPERS[name](lambda x: tr.row_linear(tr.column_linear(x, w1, tp), w2, tp), x)
        torch.autograd.backward(y.sum())
    assert w1.grad is None and w2.grad is None
    assert w1.main_grad.equal(torch.full((4, 8), 16.0))  # type: ignore[attr-defined]
    assert w2.main_grad.equal(torch.full((8, 4), 16.0))  # type: ignore[attr-defined]


# ---------- results


@pytest.mark.parametrize("batch", (1, 2))
def test_results_can_be_changed_in_place(batch: int) -> None:
    """Also gradients of a backward pass that is recorded."""
    x, weight = torch.ones(batch, 4, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True)
    with tr.TensorParallel("self") as tp:
        h = tr.column_linear(x, weight, tp).mul_(2)
        y = tr.row_linear(h, weight.t(), tp).mul_(2)
        grads = torch.autograd.grad(y.sum(), (h, x, weight), create_graph=True)
    assert y.eq(8 * 2 * 6 * 2).all()
    assert grads[0].eq(16).all()
    for each in grads:
        assert each.mul_(2).requires_grad


def test_a_part_of_a_weight_is_its_own_memory() -> None:
    whole = torch.ones(6, 4)
    with tr.TensorParallel("self") as tp:
        for dim in (0, 1, -1):
            part = tp.shard(whole, dim)
            part.zero_()
            assert whole.eq(1).all() and part.is_contiguous()
        with pytest.raises(tr.ConfigurationError, match="dim=2 of"):
            tp.shard(whole, 2)


# ---------- what stays is the faster


def both(here: Here, width: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """h of a column layer, and y of a row layer of another width after it, where either may stay."""
    with tr.TensorParallel(stays="either", transport=transport_of(here)) as tp:
        h = tr.column_linear(torch.ones(1, 64, 512), torch.ones(8, 512), tp)
        return tuple(h.shape), tr.row_linear(h, torch.ones(width, 8), tp)


@pytest.mark.parametrize("width", (2, 4096))
def test_a_row_layer_follows_the_shape_of_h(ranks: RankPools, width: int) -> None:
    for shape, y in ranks(2)(both, width):
        assert shape in ((1, 128, 8), (1, 64, 16))
        assert y.shape == (1, 64, width) and relative_error(y, torch.full_like(y, 512.0 * 16)) < 1e-5


# ---------- errors name who was called

X = torch.ones(1, 4, 8)
NAMED: dict[str, tuple[Call, str]] = {
    "vmap": (
        lambda tp: torch.func.vmap(lambda x: tr.column_linear(x, WEIGHT, tp))(X[None]),
        "tokenring.column_linear was called inside a transform",
    ),
    "a collective in vmap": (
        lambda tp: torch.func.vmap(lambda x: tr.all_reduce(x, tp))(X),
        "tokenring.all_reduce was called inside a transform",
    ),
    "a second derivative": (lambda tp: second_derivative(tp), "a second derivative of tokenring.row_linear"),
    "meta": (lambda tp: tr.column_linear(X.to("meta"), WEIGHT.to("meta"), tp), "column_linear of a meta tensor"),
    "a collective of meta": (lambda tp: tr.all_gather(X.to("meta"), tp), "all_gather of a meta tensor"),
    "closed": (lambda tp: closed(tp), "this TensorParallel was closed"),
}


def closed(tp: tr.TensorParallel) -> None:
    tp.close()
    tr.all_reduce(X, tp)


def second_derivative(tp: tr.TensorParallel) -> None:
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(tr.row_linear(x, WEIGHT, tp).square().sum(), x, create_graph=True)
    torch.autograd.backward(dx.sum())


@pytest.mark.parametrize("what", NAMED)
def test_errors_name_the_call(what: str) -> None:
    call, says = NAMED[what]
    with tr.TensorParallel("self") as tp, pytest.raises(tr.TokenRingError) as caught:
        call(tp)
    assert says in str(caught.value) and "attention" not in str(caught.value)


GOOD: dict[str, Any] = {"operator": "column", "tokens": 8, "features": 4, "width": 2, "dtype": torch.float32}
PLANNED: dict[str, dict[str, Any]] = {
    "operator 'foo'": {"operator": "foo"},
    "did you mean column?": {"operator": "colum"},
    "use one of column, row, reduce, gather": {"operator": "attention"},
    "tokens=0: give a positive integer": {"tokens": 0},
    "width=2.0: give a positive integer": {"width": 2.0},
    "they are the ranks, 1": {"operator": "reduce"},
    "torch.float64 is not supported": {"dtype": torch.float64},
}


@pytest.mark.parametrize("says", PLANNED)
def test_plans_are_checked(says: str) -> None:
    with tr.TensorParallel("self") as tp:
        assert tp.plan(**GOOD).name == "direct-q"
        with pytest.raises(tr.TokenRingError) as caught:
            tp.plan(**(GOOD | PLANNED[says]))
    assert says in str(caught.value)


def test_a_plan_of_a_collective_moves_rows() -> None:
    with tr.TensorParallel("self", "ring") as tp, pytest.raises(tr.ConfigurationError, match="rows have to move"):
        tp.plan("reduce", 8, 1, 2, torch.float32)
