"""What is given to the public functions and is not what they take: refused at once, in our own words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from ranks import Here, RankPools

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel, UnsupportedError
from tokenring.backends.interfaces import AttentionKernel, Transport
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.transports.gloo import GlooTransport

LAYOUTS = "choose one of contiguous, zigzag, striped, or cut one finer, as in 'zigzag/2'"
SCHEDULES = (
    "ring, tokenring, bidirectional, direct-kv, direct-q, all-gather-kv, ulysses[/K], packed/G, uneven/G, usp/U, "
    "tiles/AxB, sub-sharded/UxAxB, mixed[/GxH], double-ring/L, case-iii/L, case-iii-direct/L, reduced/L, relay/L, "
    "relay-q/L, mesh-kv/AxBx..., mesh-q/AxBx..., multi-ring, multi-ring-q"
)
KERNELS = (
    "cpu-flash, reference, npu-fusion, torch-flash, torch-cudnn, torch-efficient, flash-attn, flash-attn-3, "
    "flash-attn-4, flex"
)
ALONE = ContextParallel()
X = torch.zeros(1, 8, 2, 16)

CHOICE = (
    "choose one of auto, gloo, shm, hccl, hccl/channel, hccl/pair, hccl/batch, hccl/collectives, cuda, symm, nccl, "
    "nvshmem, or the `transport` of another ContextParallel"
)


def refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert str(caught.value) == says
    assert caught.value.__cause__ is None


CONTEXTS: list[tuple[dict[str, Any], str]] = [
    ({"layout": None}, f"layout is of type NoneType; {LAYOUTS}, or give a Layout"),
    ({"layout": 3}, f"layout is of type int; {LAYOUTS}, or give a Layout"),
    ({"layout": "zigzag/"}, f"unknown layout 'zigzag/'; {LAYOUTS}"),
    ({"layout": "zigzag/x"}, f"unknown layout 'zigzag/x'; {LAYOUTS}"),
    ({"layout": "zigzag/-2"}, f"unknown layout 'zigzag/-2'; {LAYOUTS}"),
    ({"layout": "zigzag/²"}, f"unknown layout 'zigzag/²'; {LAYOUTS}"),
    (
        {"schedule": 3},
        f"schedule is of type int; choose auto, one of {SCHEDULES}, or give a Scheme, a Schedule or a Plan",
    ),
    (
        {"schedule": "auto:"},
        f"unknown schedule '' in 'auto:'; choose auto, one of {SCHEDULES}, "
        f"or restrict the choice, as in 'auto:ring,tokenring'",
    ),
    (
        {"transport": 3},
        f"transport is of type int; {CHOICE}",
    ),
    (
        {"transport": "mpi"},
        f"unknown transport 'mpi'; {CHOICE}",
    ),
    ({"kernel": 3}, f"kernel is of type int; choose one of auto, {KERNELS}"),
    ({"kernel": Reference()}, f"kernel is of type Reference; choose one of auto, {KERNELS}"),
    *(
        (
            {"timeout_seconds": given},
            f"timeout_seconds={given!r}: give a number of seconds from 0.001 to 1e+09",
        )
        for given in (-1, 0, 1e-4, math.nan, math.inf, 1e15, "x", None, True)
    ),
    *(
        (
            {"pieces": given, "schedule": "direct-q"},
            f"pieces={given!r}: give a positive integer, or None for the default",
        )
        for given in (0, -1, 1.5, True, "2")
    ),
    ({"pieces": 2}, "pieces=2 goes with a schedule by name; others say it themselves"),
    ({"group": True}, "group is of type bool; give a ProcessGroup, a one-dimensional DeviceMesh or None"),
]


def shown(options: dict[str, Any]) -> str:
    """Without addresses, which differ between processes."""
    return re.sub(r" at 0x\w+", "", str(options))


@pytest.mark.parametrize(("options", "says"), CONTEXTS, ids=[shown(options) for options, _ in CONTEXTS])
def test_context(options: dict[str, Any], says: str) -> None:
    refused(lambda: ContextParallel(**options), says)


def test_what_context_takes() -> None:
    for seconds in (1, 0.5, Fraction(1, 2), numpy.float32(2.0)):
        assert ContextParallel(timeout_seconds=seconds).timeout_seconds == float(seconds)  # type: ignore[arg-type]
    assert ContextParallel(transport=ALONE.transport).transport is None  # type: ignore[arg-type]
    assert ContextParallel(schedule="direct-q", pieces=2).pieces == 2


SCALES: list[tuple[Any, str]] = [
    (math.nan, "nan"),
    (math.inf, "inf"),
    ("x", "'x'"),
    (True, "True"),
    (1j, "1j"),
    (torch.tensor(0.5), "a Tensor, which would get no gradient"),
]
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"scale {scale!r}": (
            lambda scale=scale: tr.attention(X, X, X, ALONE, scale=scale),  # type: ignore[misc]
            f"scale is {shown}; give a finite number, or None for 1/√D",
        )
        for scale, shown in SCALES
    },
    "lists": (
        lambda: tr.attention([1], [1], [1], ALONE),  # type: ignore[call-overload]
        "q, k and v must be tensors [B, T, H, D]; one is of type list",
    ),
    "an array": (
        lambda: tr.attention(X, X, X.numpy(), ALONE),  # type: ignore[call-overload]
        "q, k and v must be tensors [B, T, H, D]; one is of type ndarray",
    ),
    "no tensor to plan for": (
        lambda: tr.plan(X, None, X, ALONE),  # type: ignore[arg-type]
        "q, k and v must be tensors [B, T, H, D]; one is of type NoneType",
    ),
    "no context": (
        lambda: tr.attention(X, X, X, None),  # type: ignore[call-overload]
        "cp is of type NoneType; make a ContextParallel, once, and give it to every call",
    ),
    "a mask as context": (
        lambda: tr.plan(X, X, X, tr.Causal()),  # type: ignore[arg-type]
        "cp is of type Mask; make a ContextParallel, once, and give it to every call",
    ),
    "a number as mask": (
        lambda: tr.attention(X, X, X, ALONE, 3),  # type: ignore[call-overload]
        "mask is of type int; use Full(), Causal(), SlidingWindow or Documents; docs/masks.md has all masks",
    ),
    "shard: no tensor": (lambda: tr.shard([1], ALONE), "shard expects a tensor; got one of type list"),  # type: ignore[arg-type]
    "shard: no context": (
        lambda: tr.shard(X, "zigzag"),  # type: ignore[arg-type]
        "shard expects a ContextParallel as cp; got one of type str",
    ),
    "shard: no such dim": (
        lambda: tr.shard(X, ALONE, 4),
        "shard along dim=4 of a tensor [1, 8, 2, 16]: give the index of its sequence dimension",
    ),
    "shard: half a dim": (
        lambda: tr.shard(X, ALONE, 0.5),  # type: ignore[arg-type]
        "shard along dim=0.5 of a tensor [1, 8, 2, 16]: give the index of its sequence dimension",
    ),
    "shard: no dims": (
        lambda: tr.shard(torch.tensor(1.0), ALONE, 0),
        "shard along dim=0 of a tensor []: give the index of its sequence dimension",
    ),
    "unshard: no tensor": (lambda: tr.unshard(3, ALONE), "unshard expects a tensor; got one of type int"),  # type: ignore[arg-type]
    "unshard: no context": (
        lambda: tr.unshard(X, None),  # type: ignore[arg-type]
        "unshard expects a ContextParallel as cp; got one of type NoneType",
    ),
    "unshard: no such dim": (
        lambda: tr.unshard(X, ALONE, -5),
        "unshard along dim=-5 of a tensor [1, 8, 2, 16]: give the index of its sequence dimension",
    ),
    "positions: no context": (
        lambda: tr.positions(8, 8),  # type: ignore[arg-type]
        "positions expects a ContextParallel as cp; got one of type int",
    ),
    "positions: half a length": (
        lambda: tr.positions(ALONE, 8.5),  # type: ignore[arg-type]
        "layout 'zigzag': length is 8.5; give a positive integer",
    ),
    "positions: no length": (
        lambda: tr.positions(ALONE, 0),
        "layout 'zigzag': length is 0; give a positive integer",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    refused(*CALLS[name])


@pytest.mark.parametrize("device", ["nowhere", 1.5])
def test_positions_on_no_device(device: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tr.positions(ALONE, 8, device)
    assert str(caught.value).startswith(f"positions: no tensor can be made on device {device!r}: ")


def test_any_finite_scale_is_taken() -> None:
    for scale in (0.0, -1.0, 2, Fraction(1, 3), numpy.float32(0.5)):
        assert tr.attention(X, X, X, ALONE, scale=scale).shape == X.shape  # type: ignore[arg-type]


# ---------- what a kernel does not take


class Narrow(Reference):
    """Takes heads of up to 512."""

    name = "narrow"

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        return f"head_dim {head_dim} is above 512, in {dtype}" if head_dim > 512 else None


class WithNarrow(ContextParallel):
    def kernel(self, device: torch.device) -> AttentionKernel:
        return Narrow()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_asked(dtype: torch.dtype) -> None:
    wide, most = (torch.zeros(1, 8, 2, head_dim, dtype=dtype) for head_dim in (640, 512))
    with pytest.raises(UnsupportedError) as caught:
        tr.attention(wide, wide, wide, WithNarrow())
    assert str(caught.value) == (
        f"kernel 'narrow' cannot compute this call: head_dim 640 is above 512, in {dtype}; "
        f"choose another, as in ContextParallel(kernel='reference')"
    )
    assert tr.attention(most, most, most, WithNarrow()).shape == most.shape


def test_ours_take_wide_heads() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 8, 2, 640)
    ours, plain = (tr.attention(x, x, x, ContextParallel(kernel=kernel)) for kernel in ("cpu-flash", "reference"))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


# ---------- after close

CLOSED = "this ContextParallel was closed; make another, or close it after the last call"


def test_close_of_one_rank() -> None:
    x = X.clone().requires_grad_()
    with ContextParallel() as cp:
        out = tr.attention(x, x, x, cp)
    refused(lambda: tr.attention(x, x, x, cp), CLOSED)
    refused(lambda: torch.autograd.backward(out.sum()), CLOSED)
    refused(lambda: cp.transport, CLOSED)
    cp.close()
    assert torch.equal(tr.positions(cp, 8), torch.arange(8))  # needs nothing that was given back


def closed(here: Here) -> list[str]:
    """Of a ContextParallel with a transport of its own, and of one that was given it."""
    own = ContextParallel(schedule="ring", transport="gloo")
    x = torch.randn(1, 8, 2, 16)
    tr.attention(x, x, x, own)
    transport = own.transport
    assert isinstance(transport, GlooTransport) and isinstance(transport, Transport)
    guest = ContextParallel(schedule="tokenring", transport=transport)
    tr.attention(x, x, x, guest)
    guest.close()
    said = [said_by(lambda: tr.attention(x, x, x, guest)), said_by(lambda: tr.attention(x, x, x, own))]
    own.close()
    own.close()
    assert not transport._groups
    return [*said, said_by(lambda: tr.attention(x, x, x, own))]


def said_by(make: Callable[[], object]) -> str:
    try:
        make()
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def test_close(ranks: RankPools) -> None:
    assert ranks(2)(closed) == [[CLOSED, "nothing", CLOSED]] * 2


def no_transport(here: Here) -> str:
    return said_by(lambda: ContextParallel(transport=None))  # type: ignore[arg-type]


def test_no_transport_for_several_ranks(ranks: RankPools) -> None:
    says = f"transport is of type NoneType; {CHOICE}"
    assert ranks(2)(no_transport) == [says] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"ranks": "4"}, "ranks='4': give a positive integer"),
        ({"ranks": 0}, "ranks=0: give a positive integer"),
        ({"layout": 3}, "layout is of type int"),
        ({"layout": "zigzag/²"}, "unknown layout 'zigzag/²'"),
        ({"mask": 3}, "mask is of type int; use Full()"),
        ({"pieces": "x"}, "pieces='x': give a positive integer"),
        ({"length": "x"}, "length='x': give a positive integer"),
        ({"direction": 2}, "direction 2: use 1"),
    ],
)
def test_schedule(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        tr.schedule("ring", **{"ranks": 4, **arguments})


def test_direction_where_there_is_none() -> None:
    with pytest.raises(ConfigurationError, match=r"direction 1: schedule 'direct-kv' has none.*choose one of ring"):
        tr.schedule("direct-kv", 4, direction=1)


def refuses(here: Here, name: str, kind: str) -> str:
    transport = here.transport(name)
    assert transport is not None
    with pytest.raises(ConfigurationError) as caught:
        transport.prepare([(0, 1, "requests")], torch.device(kind, 0))
    transport.prepare([(0, 1, "requests")], torch.device("cpu"))
    return str(caught.value)


@pytest.mark.parametrize("name", ["gloo", "shm", "auto"])
def test_tensors_of_other_devices_are_refused(name: str, ranks: RankPools) -> None:
    """Before anything moves: what was asked, what was found, what to do."""
    moves = "gloo" if name == "gloo" else "shm"
    for text in ranks(2)(refuses, name, "cuda"):
        assert text.startswith(f"transport '{moves}' moves tensors in the memory of the CPU, and these are on cuda:0")
        assert "transport='auto'" in text
