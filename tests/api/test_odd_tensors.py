"""Tensors that are none to compute with are refused before ranks begin, and the next call works; others are taken."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from ranks import Here, RankPools
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel, UnsupportedError

X = torch.arange(1.0, 257.0).view(1, 8, 2, 16) / 256
DATA = "it has no data; give tensors on the device that is to compute"
PADDED = "pad it to one length, or lay its sequences end to end and give mask=Documents(cu_seqlens)"


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of its own parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def nested(layout: torch.layout) -> torch.Tensor:
    with quiet():  # they are a prototype
        return torch.nested.nested_tensor([X[0], X[0, :4]], layout=layout)


def distributed(group_size: int) -> torch.Tensor:
    from torch.distributed.tensor import Replicate, distribute_tensor  # a second's import, of each worker else

    mesh = init_device_mesh("cpu", (group_size,))
    return distribute_tensor(X, mesh, [Replicate()])


class Wrapped(torch.Tensor):
    """Stands for another tensor, as those of quantization libraries do."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("it was looked at")


Call = Callable[[torch.Tensor], object]


def vmapped(call: Call) -> object:
    return torch.vmap(call)(X[None])


def graded(call: Call) -> object:
    return torch.func.grad(lambda x: call(x).sum())(X)  # type: ignore[attr-defined]


def fake(call: Call) -> object:
    with FakeTensorMode() as mode:
        return call(mode.from_tensor(X))


def dual(call: Call) -> object:
    with quiet(), forward_ad.dual_level():  # it makes use of torch.jit, which warns
        return call(forward_ad.make_dual(X, X))  # type: ignore[no-untyped-call]


# How each comes to be given, and what is said of it.
ODD: dict[str, tuple[Callable[[Call], object], str]] = {
    "meta": (lambda call: call(X.to("meta")), f"a meta tensor is not supported: {DATA}"),
    "meta, by default": (
        lambda call: call_on_meta(call),
        f"a meta tensor is not supported: {DATA}",
    ),
    "nested": (lambda call: call(nested(torch.strided)), f"a nested tensor is not supported: {PADDED}"),
    "jagged": (lambda call: call(nested(torch.jagged)), f"a NestedTensor is not supported: {PADDED}"),
    "fake": (fake, f"a FakeTensor is not supported: {DATA}"),
    "wrapped": (
        lambda call: call(Wrapped(X)),
        "a Wrapped is not supported: it stands for other tensors; give a plain one",
    ),
    "under vmap": (
        vmapped,
        "a tensor under vmap is not supported: torch.func cannot look into a call of several ranks: "
        "make its dimension a part of the batch",
    ),
    "under grad": (
        graded,
        "a tensor under torch.func is not supported: torch.func cannot look into a call of several ranks: "
        "use torch.autograd",
    ),
    "dual": (
        dual,
        "a tensor with a tangent is not supported: forward mode is not computed here; use torch.autograd.grad",
    ),
}
DTENSOR = (
    "a DTensor is not supported: it has a placement on a mesh, which says nothing of a layout; "
    "give this rank's part, x.to_local()"
)


def call_on_meta(call: Call) -> object:
    """As where a model is laid out before it is filled: whatever is made is on meta then."""
    with torch.device("meta"):
        return call(torch.empty(1, 8, 2, 16))


def attending(cp: ContextParallel, turn: str = "q") -> Call:
    """With the odd one as q, k or v."""

    def call(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x if name in turn else X for name in "qkv")
        return tr.attention(q, k, v, cp)

    return call


@pytest.mark.parametrize("turn", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("what", ODD)
def test_one_rank(what: str, turn: str) -> None:
    given, says = ODD[what]
    with pytest.raises(UnsupportedError, match=re.escape(f"attention of {says}")):
        given(attending(ContextParallel(), turn))


def way(here: Here, what: str) -> Callable[[Call], object]:
    """How it comes to be given; a mesh is made by all ranks."""
    if what in ODD:
        return ODD[what][0]
    made = distributed(here.world_size)
    return lambda call: call(made)


def refused(here: Here, what: str, first: bool) -> str:
    """On all ranks but 0, in a context of its own that has met before or not."""
    with ContextParallel(schedule="ring", timeout_seconds=20.0) as cp:
        if not first:
            tr.attention(X, X, X, cp)
        given = way(here, what)
        with pytest.raises((UnsupportedError, ConfigurationError)) as caught:
            given(attending(cp)) if here.rank else attending(cp)(X)
        out = tr.attention(X, X, X, cp)  # the next call
        assert out.shape == X.shape and type(out) is torch.Tensor
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("what", [*ODD, "distributed"])
def test_all_ranks_hear(what: str, first: bool, ranks: RankPools) -> None:
    says = ODD[what][1] if what in ODD else DTENSOR
    mine, other = ranks(2)(refused, what, first)
    assert other == f"UnsupportedError: attention of {says}"
    assert mine == f"Disagreement: rank 1 refused: attention of {says}. So no rank made the call"


def sharded(here: Here, what: str) -> list[str]:
    """What shard and unshard say, on every rank; unshard works afterwards."""
    cp = here.cp()
    given = way(here, what)
    said = []
    for call in (tr.shard, tr.unshard) if what != "wrapped" else (tr.unshard,):
        try:
            given(lambda x, call=call: call(x, cp))  # type: ignore[misc]
            said.append("nothing")
        except tr.TokenRingError as error:
            said.append(f"{type(error).__name__}: {error}")
    assert tr.unshard(X, cp).shape == (1, 16, 2, 16)
    return said if len(said) > 1 else ["nothing", *said]


@pytest.mark.parametrize("what", [*ODD, "distributed"])
def test_shard_and_unshard(what: str, ranks: RankPools) -> None:
    """shard only looks up rows, and takes whatever torch does."""
    says = ODD[what][1] if what in ODD else DTENSOR
    in_shard = f"UnsupportedError: shard of {says}" if what in ("nested", "jagged", "distributed") else "nothing"
    for found in ranks(2)(sharded, what):
        assert found == [in_shard, f"UnsupportedError: unshard of {says}"]


# ---------- what is taken


class Named(torch.Tensor):
    """Holds its data itself."""


def taken(here: Here) -> list[bool]:
    """Tensors that are odd in a way that does not matter give what plain ones do."""
    with quiet():
        return takes(here)


def takes(here: Here) -> list[bool]:
    from torch.distributed.tensor import DTensor, Replicate

    cp = here.cp(schedule="ring")
    mesh = init_device_mesh("cpu", (here.world_size,))
    x = X * (here.rank + 1)
    plain = tr.attention(x, x, x, cp)
    negated = torch.complex(x, -x).conj().imag
    assert negated.is_neg()
    leaf = x.clone().requires_grad_()
    given = {
        "parameter": torch.nn.Parameter(x.clone()),
        "buffer": torch.nn.Buffer(x.clone()),
        "subclass": x.as_subclass(Named),
        "negative bit": negated,
        "not a leaf": leaf * 1.0,
        "part of a DTensor": DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(),
        "a collective's": functional.all_gather_tensor(X[:, :4].contiguous(), 1, mesh)[:, :8],
        "inference": x,
    }
    made = []
    for name, each in given.items():
        with torch.inference_mode() if name == "inference" else nullcontext():
            out = tr.attention(each, each, each, cp)
        if name == "a collective's":
            again = each.clone()
            made.append(torch.equal(out, tr.attention(again, again, again, cp)))
        else:
            made.append(torch.equal(out, plain))
    return made


def test_what_is_taken(ranks: RankPools) -> None:
    for found in ranks(2)(taken):
        assert all(found), found


def conjugated(here: Here) -> bool:
    """unshard of what torch only marks as negated or conjugated."""
    cp = here.cp()
    z = torch.complex(X, X + 1)
    whole = tr.unshard(z.conj(), cp)
    negated = tr.unshard(z.conj().imag, cp)
    plain = tr.unshard(X, cp)
    return torch.equal(whole, torch.complex(plain, -plain - 1)) and torch.equal(negated, -plain - 1)


def test_unshard_of_what_is_only_marked(ranks: RankPools) -> None:
    assert all(ranks(2)(conjugated))


def test_rows_reach_kernels_with_their_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that read memory themselves would not see the mark."""
    from tokenring.backends.kernels.cpu_flash import CpuFlash

    seen: list[bool] = []
    forward = CpuFlash.forward

    def watched(self: CpuFlash, *qkv: torch.Tensor, **how: Any) -> Any:
        seen.extend(x.is_neg() for x in qkv)
        return forward(self, *qkv, **how)

    monkeypatch.setattr(CpuFlash, "forward", watched)
    negated = torch._neg_view(X)  # whose rows need not be packed
    assert negated.is_neg() and negated.stride(-1) == 1
    tr.attention(negated, negated, negated, ContextParallel())
    assert seen == [False] * len(seen) and seen


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 8, 2, 16).to(dtype)
    with pytest.raises(UnsupportedError, match=re.escape(f"attention in {dtype} is not supported")):
        tr.attention(x, x, x, ContextParallel())


@pytest.mark.parametrize("make", [lambda x: x.to_sparse(), lambda x: x.to_mkldnn()])
def test_layouts(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = make(X)
    with pytest.raises(UnsupportedError, match=r"attention of torch\.\w+ tensors is not supported; make q, k and v"):
        tr.attention(x, x, x, ContextParallel())


def test_a_tensor_that_cannot_be_asked() -> None:
    class Shy(torch.Tensor):
        @property
        def is_nested(self) -> bool:  # type: ignore[override]
            raise RuntimeError("not this one")

    with pytest.raises(UnsupportedError, match="attention of a Shy is not supported: not this one"):
        tr.attention(X.as_subclass(Shy), X, X, ContextParallel())


def test_errors_still_pickle() -> None:
    """As they must to come from a rank's process."""
    assert str(pickle.loads(pickle.dumps(UnsupportedError("x")))) == "x"
