"""Column and row linears on real processes: against float64, bytes to the byte, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from oracle import relative_error
from ranks import Here, RankPools
from sampling import FULL_GRID

import tokenring as tr
from tokenring.api.tensor_parallel import WIDE
from tokenring.backends.interfaces import Transport
from tokenring.ir.operators import OPERATORS
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.schedule.families import parse
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout

FAMILIES = {
    1: ("direct-q",),
    2: ("direct-q", "ring"),
    3: ("tokenring", "direct-kv"),
    4: (
        "direct-q", "direct-q/pieces4", "tokenring", "direct-kv", "ring", "bidirectional", "bidirectional/pieces4",
        "tiles/2x2", "double-ring/2", "relay/2", "relay-q/2", "reduced/2", "mesh-q/2x2", "mesh-kv/2x2",
    ),
}  # fmt: skip
FULL = {
    5: ("direct-q", "direct-q/pieces4", "tokenring", "direct-kv", "ring", "bidirectional"),
    6: ("direct-q", "tokenring", "direct-kv", "ring", "tiles/2x3", "tiles/3x2", "relay/3", "relay-q/3", "mesh-q/2x3"),
    7: ("direct-q", "direct-q/pieces2", "tokenring", "direct-kv", "ring", "bidirectional/pieces4"),
    8: (
        "direct-q", "direct-q/pieces4", "tokenring", "direct-kv", "ring", "bidirectional", "tiles/2x4", "double-ring/4",
        "relay/4", "relay-q/4", "reduced/4", "mesh-q/2x2x2", "mesh-kv/2x4",
    ),
}  # fmt: skip
POINTS = [
    (ranks, name)
    for ranks, names in (FAMILIES | (FULL if FULL_GRID else {})).items()
    for name in names
]
NAMES = ("y", "dx", "dw1", "dw2")
Sent = dict[tuple[str, Pass], dict[int, int]]


class Sizes(NamedTuple):
    batch: int
    tokens: int  # of the whole sequence
    features: int
    width: int


SIZES = Sizes(2, 96, 48, 24)


def sizes_of(world: int) -> Sizes:
    """Sizes that the ranks divide."""
    return SIZES if 48 % world == 0 else Sizes(2, 20 * world, 8 * world, 24)


class Given(NamedTuple):
    x: torch.Tensor
    w1: torch.Tensor  # [N, D]
    w2: torch.Tensor  # [D, N]
    dy: torch.Tensor


def given(sizes: Sizes, dtype: torch.dtype) -> Given:
    random = torch.Generator().manual_seed(7)
    batch, tokens, features, width = sizes
    shapes = (batch, tokens, width), (features, width), (width, features), (batch, tokens, width)
    return Given(*(torch.randn(*shape, generator=random).to(dtype) for shape in shapes))


def unsplit(of: Given, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The two layers on one process, with a square between, in this dtype."""
    x, w1, w2 = (each.to(dtype).requires_grad_() for each in of[:3])
    h = torch.nn.functional.linear(x, w1)
    y = torch.nn.functional.linear(h * h.detach().sign(), w2)
    y.backward(of.dy.to(dtype))  # type: ignore[no-untyped-call]
    assert x.grad is not None and w1.grad is not None and w2.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw1": w1.grad, "dw2": w2.grad}


def as_on_the_wire(of: Given, world: int) -> dict[str, torch.Tensor]:
    """The two layers in bf16, of which each rank's part of a sum is rounded once, as partials on a wire are."""
    w1, w2 = of.w1.chunk(world), of.w2.chunk(world, 1)
    h = torch.nn.functional.linear(of.x, of.w1)
    act, sign = h * h.sign(), h.sign()

    def summed(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([part.float() for part in parts]).sum(0).bfloat16()

    dact = of.dy @ of.w2
    dh = dact * sign
    rows = [each.chunk(world, 1) for each in (act, of.dy, dh, of.x)]
    own = [[part.flatten(0, 1) for part in each] for each in rows]
    return {
        "y": summed([a @ w.t() for a, w in zip(act.chunk(world, 2), w2, strict=True)]),
        "dx": summed([a @ w for a, w in zip(dh.chunk(world, 2), w1, strict=True)]),
        "dw1": summed([a.t() @ b for a, b in zip(own[2], own[3], strict=True)]),
        "dw2": summed([a.t() @ b for a, b in zip(own[1], own[0], strict=True)]),
    }


def layers(
    here: Here, name: str, sizes: Sizes, dtype: torch.dtype, partials: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], Sent]:
    """Both layers and both passes at one rank: its parts of the results, and its bytes."""
    of, transport = given(sizes, dtype), here.base.transport
    options: dict[str, Any] = {} if transport is None else {"transport": transport}
    sent: Sent = {}
    counter: dict[int, int] = {} if transport is None else transport.sent_bytes
    with tr.TensorParallel(schedule=name, partials=partials, **options) as tp:
        x = of.x.chunk(here.world_size, 1)[here.rank].contiguous().requires_grad_()
        w1, w2 = tp.shard(of.w1).requires_grad_(), tp.shard(of.w2, 1).requires_grad_()
        counter.clear()
        h = tr.column_linear(x, w1, tp)
        sent["column", "forward"] = dict(counter)
        counter.clear()
        y = tr.row_linear(h * h.detach().sign(), w2, tp)
        sent["row", "forward"] = dict(counter)
        counter.clear()
        dh, dw2 = torch.autograd.grad(y, (h, w2), of.dy.chunk(here.world_size, 1)[here.rank], retain_graph=True)
        sent["row", "backward"] = dict(counter)
        counter.clear()
        dx, dw1 = torch.autograd.grad(h, (x, w1), dh)
        sent["column", "backward"] = dict(counter)
    return {"y": y.detach(), "dx": dx, "dw1": dw1, "dw2": dw2}, sent


DIMS = {"y": 1, "dx": 1, "dw1": 0, "dw2": 1}


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts], DIMS[name]) for name in NAMES}


def errors(made: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: relative_error(made[name], wanted[name]) for name in NAMES}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize(("world", "name"), POINTS)
def test_exact(ranks: RankPools, world: int, name: str, dtype: torch.dtype) -> None:
    sizes = sizes_of(world)
    of = given(sizes, dtype)
    wanted = unsplit(of, torch.float64)
    alone = unsplit(of, dtype) if dtype == torch.float32 else as_on_the_wire(of, world)
    if parse(name).family.moves == "Q":  # weights stay: their gradients never move
        alone |= {each: value for each, value in unsplit(of, dtype).items() if each.startswith("dw")}
    parts = ranks(world)(layers, name, sizes, dtype)
    found, least = errors(joined([part for part, _ in parts]), wanted), errors(alone, wanted)
    limits = {each: 1e-5 if dtype == torch.float32 else 1.1 * least[each] for each in NAMES}
    assert not {each: (found[each], limits[each]) for each in NAMES if not found[each] <= limits[each]}
    check_bytes(world, name, dtype, [sent for _, sent in parts])


@pytest.mark.parametrize(("world", "name"), [each for each in POINTS if each[0] > 1])
def test_parts_in_fp32_leave_the_error_of_one_device(ranks: RankPools, world: int, name: str) -> None:
    """In bf16, both layers and passes: at most 1.1 times that of the unsplit products."""
    sizes = sizes_of(world)
    of = given(sizes, torch.bfloat16)
    wanted = unsplit(of, torch.float64)
    parts = ranks(world)(layers, name, sizes, torch.bfloat16, torch.float32)
    found, alone = errors(joined([part for part, _ in parts]), wanted), errors(unsplit(of, torch.bfloat16), wanted)
    assert not {each: (found[each], alone[each]) for each in NAMES if not found[each] <= 1.1 * alone[each]}
    check_bytes(world, name, torch.bfloat16, [sent for _, sent in parts], WIDE)


def check_bytes(
    world: int, name: str, dtype: torch.dtype, sent: list[Sent], codecs: tuple[tuple[str, str], ...] = ()
) -> None:
    batch, tokens, features, width = sizes_of(world)
    for operator in ("column", "row"):
        schedule = schedule_of(operator, world, name, batch * tokens, features).replace(codecs=codecs)
        workload = tr.Workload(1, batch * tokens, features, 1, 1, width, dtype)
        for direction in PASSES:
            counted = {
                (src, dst): n for src, each in enumerate(sent) for dst, n in each[operator, direction].items() if n
            }
            assert counted == schedule.link_bytes(workload, direction), (operator, direction)


def schedule_of(operator: str, world: int, name: str, rows: int, columns: int) -> tr.Schedule:
    q, kv = make_layout("contiguous", world, rows), make_layout("contiguous", world, columns)
    return make_schedule(name, q, kv, tr.Full()).replace(operator=OPERATORS[operator])


# ---------- what a model asks for besides


def transport_of(here: Here) -> Transport:
    assert here.base.transport is not None
    return here.base.transport


def with_main_grad(here: Here, fused: bool) -> list[torch.Tensor | None]:
    """The main_grad of both weights after two backward passes, and what autograd left beside it."""
    of = given(SIZES, torch.bfloat16)
    with tr.TensorParallel(transport=transport_of(here)) as tp:
        x = of.x.chunk(here.world_size, 1)[here.rank].contiguous()
        weights = tp.shard(of.w1).requires_grad_(), tp.shard(of.w2, 1).requires_grad_()
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
            if fused:
                weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        for _ in range(2):
            y = tr.row_linear(tr.column_linear(x, weights[0], tp), weights[1], tp)
            y.sum().backward()  # type: ignore[no-untyped-call]
            assert all(getattr(weight, "grad_added_to_main_grad", True) for weight in weights)
    return [*(weight.main_grad for weight in weights), *(weight.grad for weight in weights)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("fused", (False, True))
def test_gradients_go_into_main_grad(ranks: RankPools, fused: bool) -> None:
    """In fp32, unrounded; to Megatron's hooks a gradient of zeros, else none."""
    parts = ranks(2)(with_main_grad, fused)
    of = Given(*(each.double().requires_grad_() for each in given(SIZES, torch.bfloat16)))
    (torch.nn.functional.linear(torch.nn.functional.linear(of.x, of.w1), of.w2).sum() * 2).backward()  # type: ignore[no-untyped-call]
    for number, (weight, dim) in enumerate(((of.w1, 0), (of.w2, 1))):
        made = torch.cat([found for part in parts if (found := part[number]) is not None], dim)
        assert made.dtype == torch.float32
        assert weight.grad is not None
        assert relative_error(made, weight.grad) < 6e-3
        left = [part[number + 2] for part in parts]
        assert all((each is None) != fused and (each is None or not each.any()) for each in left)


def other_sizes(here: Here, what: str) -> str:
    """The error of a call in which rank 1 differs."""
    odd, transport = here.rank == 1, transport_of(here)
    name = "tokenring" if odd and what == "schedule" else "direct-q"
    with tr.TensorParallel(schedule=name, transport=transport) as tp:
        x = torch.randn(1, 6 if odd and what == "tokens" else 4, 8)
        weight = torch.randn(4 if odd and what == "features" else 2, 4 if odd and what == "width" else 8)
        with pytest.raises(tr.TokenRingError) as caught:
            tr.column_linear(x, weight, tp)
        good = tr.column_linear(torch.ones(1, 4, 8), torch.ones(2, 8), tp) if what != "schedule" else None
        assert good is None or good.shape == (1, 8, 2)  # the group lives on
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("tokens", "x: rank 0: [1, 4, 8]; rank 1: [1, 6, 8]"),
        ("features", "weight: rank 0: [2, 8]; rank 1: [4, 8]"),
        ("width", "rank 1 refused: column_linear was given"),
        ("schedule", "schedule: rank 0: direct-q; rank 1: tokenring"),
    ],
)
def test_ranks_that_differ(ranks: RankPools, what: str, says: str) -> None:
    for rank, text in enumerate(ranks(2)(other_sizes, what)):
        assert says.removeprefix("rank 1 refused: " if rank else "") in text


X, W = torch.ones(1, 4, 8), torch.ones(6, 8)
REFUSED: dict[str, Callable[[tr.TensorParallel], torch.Tensor]] = {
    "give x [B, T/P, D]": lambda tp: tr.column_linear(X[0], W, tp),
    "[1, 4, 8] and [6, 7]": lambda tp: tr.column_linear(X, W[:, :7], tp),
    "in one dtype": lambda tp: tr.column_linear(X, W.bfloat16(), tp),
    "torch.float64 is not supported": lambda tp: tr.column_linear(X.double(), W.double(), tp),
    "was given a list": lambda tp: tr.column_linear(X, [1], tp),  # type: ignore[arg-type]
    "tp is of type int": lambda tp: tr.column_linear(X, W, 3),  # type: ignore[arg-type]
    "make a TensorParallel, once": lambda tp: tr.row_linear(X, W, None),  # type: ignore[arg-type]
    "h has the weight's features": lambda tp: tr.row_linear(X, W[:, :5], tp),
}


@pytest.mark.parametrize("says", REFUSED)
def test_refused(says: str) -> None:
    with tr.TensorParallel("self") as tp, pytest.raises(tr.TokenRingError) as caught:
        REFUSED[says](tp)
    assert says in str(caught.value)


def test_options_are_checked() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"stays": "nobody"}, "stays='nobody'"), 
        ({"schedule": "rings"}, "unknown schedule"),
        ({"schedule": "tiles/2x2"}, "2 × 2 is not 1"),
        ({"schedule": 3}, "give a name"),
        ({"topology": "mesh"}, "topology is of type str; give an Interconnect"),
        ({"partials": torch.bfloat16}, "use torch.float32"),
    )
    for options, says in cases:
        with pytest.raises(tr.ConfigurationError, match=says):
            tr.TensorParallel("self", **options)
    with tr.TensorParallel("self", "ulysses/2") as tp, pytest.raises(tr.TokenRingError, match="head groups"):
        tr.column_linear(X, W, tp)
    tp = tr.TensorParallel("self")
    tp.close()
    with pytest.raises(tr.ConfigurationError, match="closed"):
        tr.column_linear(X, W, tp)


def wrong_place(here: Here) -> str:
    with tr.TensorParallel(schedule="ring", transport=transport_of(here)) as tp:
        with pytest.raises(tr.TokenRingError) as caught:
            tr.row_linear(torch.ones(1, 4, 3), torch.ones(8, 3), tp)
        return str(caught.value)


def test_a_row_layer_after_another_placement(ranks: RankPools) -> None:
    assert all("schedule 'ring' has 2 and 6 on a rank" in text for text in ranks(2)(wrong_place))


def second_derivative() -> None:
    with tr.TensorParallel("self") as tp:
        x = X.clone().requires_grad_()
        (dx,) = torch.autograd.grad(tr.column_linear(x, W, tp).square().sum(), x, create_graph=True)
        dx.sum().backward()  # type: ignore[no-untyped-call]


def test_second_derivatives_are_refused() -> None:
    with pytest.raises(tr.UnsupportedError, match="second derivative"):
        second_derivative()
