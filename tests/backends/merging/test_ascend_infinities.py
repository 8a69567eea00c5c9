"""Merging on an NPU whose operators fail at infinities or in strided memory: in another form, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ascend import device, schemas
from ascend.hccl_ranks import fresh
from ascend.operators import register
from ascend.ranks import NpuPools
from ascend.schemas import OFFERS
from merging import CASES, check, check_kept, check_softmax
from ranks import Here
from test_ascend_runs import runs

from tokenring import Causal, ContextParallel, Full, UnsupportedError, attention
from tokenring.backends.merging import choice
from tokenring.backends.merging.choice import choose_merger, merge_refusal, trial
from tokenring.backends.merging.finite import FiniteMerger
from tokenring.backends.merging.torch_merger import TorchMerger

WITHOUT_UPDATE = "without npu_attention_update"
Fault = Callable[..., Any]


def plain_logaddexp(x: Any, y: Any, *, out: Any) -> Any:
    """As aclnnLogAddExp is documented: max + log(1 + exp(-|x - y|)), which is NaN for two -inf.

    CANN's ops-math, math/log_add_exp; its TBE kernel guards two -inf on the 910B and later (`after_v200`), not before.
    """
    a, b = device.raw(x), device.raw(y)
    device.raw(out).copy_(torch.maximum(a, b) + torch.log(1 + torch.exp(-(a - b).abs())))
    return out


def clamp_of_finite(x: Any, *limits: Any, out: Any = None, **named: Any) -> Any:
    """A clamp that leaves infinities."""
    low = limits[0] if limits else named.get("min")
    given = device.raw(x)
    made = torch.where(given.isinf(), given, given.clamp(min=low))
    if out is None:
        return device.wrap(made)
    device.raw(out).copy_(made)
    return out


def lerp_in_one_block(out: Any, new: Any, weight: Any) -> Any:
    """A lerp_ that writes as if its operand were one block of memory."""
    into = device.raw(out)
    made = torch.lerp(into, device.raw(new), device.raw(weight))
    torch.as_strided(into, (into.numel(),), (1,)).copy_(made.flatten())
    return out


def exp_of_nothing(x: Any, *_: Any, out: Any = None) -> Any:
    """An exp that is NaN far below 0: no form can do without it."""
    made = device.raw(x).exp().masked_fill(device.raw(x) < -88, float("nan"))
    if out is not None:
        device.raw(out).copy_(made)
    return device.wrap(made) if out is None else out


FAULTS: dict[str, dict[str, Fault]] = {
    "two -inf are NaN": {"aten::logaddexp": plain_logaddexp},
    "infinities stay": {"aten::clamp": clamp_of_finite},
    "strides are lost": {"aten::lerp_": lerp_in_one_block},
}
BROKEN: dict[str, Fault] = {
    "aten::exp": exp_of_nothing,
    "aten::exp_": lambda x: (device.raw(x).masked_fill_(device.raw(x) < -88, float("nan")).exp_(), x)[1],
}


@contextmanager
def with_faults(faults: dict[str, Fault]) -> Iterator[torch.device]:
    """An NPU with these operators, and no npu_attention_update; nothing is known of it."""
    offered = {name: text for name, text in OFFERS["2.9.1"].items() if name != "npu_attention_update"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(schemas.OFFERS, WITHOUT_UPDATE, offered)
        register(WITHOUT_UPDATE)
        trial.cache_clear()
        for name, fault in faults.items():
            patched.setitem(device.operators, name, fault)
        yield torch.empty(0, device="npu").device
    trial.cache_clear()
    register("2.13.0")


@pytest.mark.parametrize("name", FAULTS)
def test_another_form_is_taken(npus: NpuPools, name: str) -> None:
    npus(1)(another_form, name)


def another_form(here: Here, name: str) -> None:
    with with_faults(FAULTS[name]) as where:
        made = choose_merger(where, 64)
        assert made.merger.name == "finite"
        assert dict(made.others)["torch"].startswith("tried on npu, its ")
        assert merge_refusal(where, 64) is None


@pytest.mark.parametrize("name", ["", *FAULTS])
def test_calls_are_exact(npus: NpuPools, name: str) -> None:
    """In half precision accumulators lie in the pool, between lses."""
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for errors in npus(2)(whole, name, dtype):
            assert max(errors[each] for each in ("out", "dq", "dk", "dv", "lse")) < limit, errors


def whole(here: Here, name: str, dtype: torch.dtype) -> dict[str, float]:
    with with_faults(FAULTS.get(name, {})):
        return runs(here, WITHOUT_UPDATE, "tokenring", "zigzag", Causal(), (4, 2), dtype)


def test_a_sound_device_keeps_torch(npus: NpuPools) -> None:
    npus(1)(sound)


def sound(here: Here) -> None:
    with with_faults({}) as where:
        assert choose_merger(where, 64).merger == TorchMerger()


def test_without_any_form_it_is_refused_by_name(npus: NpuPools) -> None:
    for text in npus(2)(refused):
        assert text.startswith("nothing merges partial results right on npu (npu-update: "), text
        assert "torch: tried on npu" in text and "finite: tried on npu" in text
        assert "leave INF_NAN_MODE_ENABLE as it is by default" in text


def refused(here: Here) -> str:
    """On every rank, before anything moves."""
    with with_faults(BROKEN):
        fresh()
        q = torch.zeros(1, 16, 2, 16).to("npu")
        with ContextParallel(schedule="ring", transport="hccl") as cp, pytest.raises(UnsupportedError) as caught:
            attention(q, q, q, cp=cp, mask=Full())
    return str(caught.value)


def test_the_form_without_infinities_passes_the_suite() -> None:
    merger = FiniteMerger()
    for case in CASES:
        check(merger, case)
    check_kept(merger)
    check_softmax(merger, 3)


def test_cpus_and_cuda_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(choice, "trial", never)
    for kind in ("cpu", "meta"):
        assert choose_merger(torch.device(kind), 64).merger == TorchMerger()
        assert merge_refusal(torch.device(kind), 64) is None
    assert merge_refusal(torch.device("cuda"), 64) is None
