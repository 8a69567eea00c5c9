"""Whole calls on emulated NPUs: schedules, masks, layouts and GQA, forward and backward, against float64.

Messages go over Gloo here; what HCCL asks of them is another matter (test_hccl_families).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ascend.device import NpuTensor, host_waits
from ascend.gloo import OverGloo
from ascend.operators import calls, register
from ascend.ranks import NpuPools
from oracle import allowed, attention64, relative_error
from patience import patient
from ranks import PEER_SECONDS, Here

from tokenring import Causal, ContextParallel, Documents, Full, Mask, SlidingWindow, UnsupportedError, attention
from tokenring.backends.kernels import npu_trials
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.backends.kernels.npu_packed import NpuPacking
from tokenring.backends.kernels.npu_running import RunningRows
from tokenring.backends.kernels.npu_running import merged as merged_rows
from tokenring.backends.merging.torch_merger import merge_
from tokenring.lowering.program import Attend

LENGTH = 48
DOCUMENTS = Documents([0, 7, 20, 21, 44])
MASKS = {
    "full": Full(),
    "causal": Causal(),
    "window": SlidingWindow(9),
    "documents": DOCUMENTS,
    "causal documents": DOCUMENTS & Causal(),
    "windows of documents": DOCUMENTS & SlidingWindow(4),
}
LIMITS = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (4e-3, 6e-3)}


def context(here: Here, **options: Any) -> ContextParallel:
    if here.world_size > 1:
        if "npu" not in here.transports:
            assert dist.group.WORLD is not None
            here.transports["npu"] = OverGloo(dist.group.WORLD, patient(PEER_SECONDS))
        options["transport"] = here.transports["npu"]
    return ContextParallel(**options)


def runs(
    here: Here, offer: str, schedule: str, layout: str, mask: Mask, heads: tuple[int, int], dtype: torch.dtype
) -> dict[str, float]:
    """The largest error of any rank's part, and how many calls were packed."""
    register(offer)
    length = LENGTH // here.world_size * here.world_size
    cp = context(here, schedule=schedule, layout=layout)
    random = torch.Generator().manual_seed(1)
    shapes = {"q": heads[0], "k": heads[1], "v": heads[1], "dout": heads[0]}
    whole = {name: torch.randn(2, length, count, 16, generator=random).to(dtype) for name, count in shapes.items()}
    rows = torch.tensor(cp.layout_for(length).positions(here.rank))
    q, k, v, dout = (whole[name][:, rows].to("npu").requires_grad_(name != "dout") for name in shapes)
    out, lse = attention(q, k, v, cp=cp, mask=mask, return_lse=True)
    assert out.device.type == "npu" and out.dtype == dtype
    torch.autograd.backward(out, dout)
    visible = allowed(mask, length, length)
    right = attention64(whole["q"], whole["k"], whole["v"], whole["dout"], visible, 1 / math.sqrt(16))
    made = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    errors = {}
    for name, x in made.items():
        assert x is not None
        wanted = getattr(right, name)
        # A rank's part beside the size of the whole: parts of padding alone are 0.
        scale = float(wanted.norm()) / math.sqrt(here.world_size)
        errors[name] = float((x.cpu().double() - wanted[:, rows]).norm()) / scale
    shown = right.lse[:, :, rows]
    seen = ~shown.isinf()
    assert torch.equal(lse.cpu().isinf(), ~seen)
    errors["lse"] = relative_error(lse.cpu()[seen], shown[seen]) if bool(seen.any()) else 0.0
    packed = [call for call in calls if call.arguments.get("input_layout") == "TND"]
    return errors | {"packed": sum(call.arguments["actual_seq_qlen"] != npu_trials.ENDS for call in packed)}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("world_size", "schedule", "layout", "offer"),
    [
        (1, "ring", "contiguous", "2.13.0"),
        (2, "tokenring", "zigzag", "2.9.1"),
        (3, "ring", "contiguous", "op-plugin 7.1.0"),
        (4, "ring", "zigzag", "2.14.0"),
        (4, "usp/2", "striped", "2.7.1.post11"),
    ],
)
def test_exact(npus: NpuPools, world_size: int, schedule: str, layout: str, offer: str, mask: str) -> None:
    found = npus(world_size)(runs, offer, schedule, layout, MASKS[mask], (4, 2), torch.float32)
    for errors in found:
        packed = errors.pop("packed")
        for name, error in errors.items():
            assert error < LIMITS[torch.float32][name != "out"], name
        assert mask not in ("full", "causal") or packed == 0
    if "documents" in mask and (world_size, layout) == (1, "contiguous"):
        assert packed == 2  # forward and backward: one call each, for five documents


@pytest.mark.parametrize("mask", ["causal", "causal documents"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_half_is_accumulated_in_fp32(npus: NpuPools, world_size: int, mask: str) -> None:
    """Over several ranks no more than 1.5 times the error of one call of the operator."""
    arguments = ("2.13.0", "ring", "zigzag", MASKS[mask], (4, 2), torch.bfloat16)
    (alone,) = npus(1)(runs, *arguments)
    found = npus(world_size)(runs, *arguments)
    for name in ("out", "dq", "dk", "dv"):
        assert math.sqrt(sum(each[name] ** 2 for each in found) / world_size) < 1.5 * alone[name], name


def test_what_is_accumulated_is_fp32(npus: NpuPools) -> None:
    """Whatever bf16 the operator gives: running outputs are merged, and gradients added up, in fp32."""
    for wheel in ("2.9.1", "2.13.0"):
        for merged, added in npus(4)(accumulated, wheel):
            assert merged == added == {torch.float32}


def accumulated(here: Here, wheel: str) -> tuple[set[torch.dtype], set[torch.dtype]]:
    merged, added = set[torch.dtype](), set[torch.dtype]()

    def merge(out: torch.Tensor, *others: torch.Tensor) -> None:
        merged.add(out.dtype)
        merge_(out, *others)

    def add(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        added.add(x.dtype)
        return torch.Tensor.add_(x, other)

    def update(operator: Any, before: RunningRows, after: RunningRows) -> RunningRows:
        merged.update((before.out.dtype, after.out.dtype))
        return merged_rows(operator, before, after)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tokenring.backends.merging.torch_merger.merge_", merge)
        patched.setattr("tokenring.backends.kernels.npu_running.merged", update)
        patched.setattr(NpuTensor, "add_", add, raising=False)
        runs(here, wheel, "ring", "zigzag", Full(), (4, 2), torch.bfloat16)
    return merged, added


def test_no_waiting_inside_a_pass(npus: NpuPools) -> None:
    """But for those of Gloo, which is not the device's, there is none."""
    assert npus(1)(waits) == [[]]


def waits(here: Here) -> list[str]:
    register("2.13.0")
    cp = ContextParallel()
    q, k, v = (torch.randn(1, 32, 2, 16).to("npu").requires_grad_() for _ in range(3))
    dout = torch.randn(1, 32, 2, 16).to("npu")
    for mask in (Causal(), Documents([0, 9, 32]) & Causal()):
        host_waits.clear()
        torch.autograd.backward(attention(q, k, v, cp=cp, mask=mask), dout)
        if host_waits:
            return list(host_waits)
    return []


def test_a_trace_holds_every_patch(npus: NpuPools) -> None:
    """Of patches that go together the first takes the time of all."""
    ((count, seconds),) = npus(1)(traced)
    assert count == 3 and seconds[0] > 10 * max(seconds[1:])


def traced(here: Here) -> tuple[int, list[float]]:
    register("2.13.0")
    cp = ContextParallel()
    q, k, v = (torch.randn(1, 32, 2, 16).to("npu") for _ in range(3))
    with cp.trace() as trace:
        attention(q, k, v, cp=cp, mask=Documents([0, 9, 20, 32]))
    events = [event for event in trace.events if isinstance(event.instruction, Attend)]
    assert len(calls) == 1
    return len(events), [event.seconds for event in events]


def test_other_kernels_run_there_too(npus: NpuPools) -> None:
    assert npus(1)(by_reference)[0] < 1e-6


def by_reference(here: Here) -> float:
    register("2.13.0")
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    there = [x.to("npu") for x in (q, k, v)]
    out = attention(there[0], there[1], there[2], cp=ContextParallel(kernel="reference"), mask=Causal())
    assert calls == []
    return relative_error(out.cpu(), attention64(q, k, v, q, allowed(Causal(), 32, 32), 0.25).out)


def test_too_many_heads_are_refused_before_anything_runs(npus: NpuPools) -> None:
    """In our words; without the question (the mutant) the operator refuses in the middle of the pass."""
    npus(1)(many_heads)


def many_heads(here: Here) -> None:
    register("2.13.0")
    q = torch.zeros(1, 4, 257, 8, device="npu")
    with pytest.raises(UnsupportedError, match=r"takes up to 256 query heads, not 257; choose another"):
        attention(q, q, q, cp=ContextParallel(), mask=Causal())
    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError, match="257 heads; 1 to 256"):
        patched.setattr(NpuFusion, "supports_heads", staticmethod(lambda q_heads: None))
        attention(q, q, q, cp=ContextParallel(), mask=Causal())


def test_empty_documents_never_reach_the_operator(npus: NpuPools) -> None:
    """Documents without tokens, also as the first and the last, are none; a list that has one (the mutant) is seen."""
    ((errors, lists, spoilt),) = npus(1)(with_empty_documents)
    assert errors.pop("packed") == 2 and max(errors.values()) < LIMITS[torch.float32][1]
    assert len(lists) == len(spoilt) == 2
    assert all(sorted(set(each)) == each and each[0] > 0 for each in lists)
    assert not any(sorted(set(each)) == each for each in spoilt)


def with_empty_documents(here: Here) -> tuple[dict[str, float], list[list[int]], list[list[int]]]:
    given: Any = ("2.13.0", "ring", "contiguous", Documents([0, 0, 7, 7, 20, 21, 44, 44]), (4, 2), torch.float32)
    errors, lists = runs(here, *given), lengths()
    with pytest.MonkeyPatch.context() as patched:
        ends = NpuPacking._ends
        patched.setattr(NpuPacking, "_ends", lambda self, spans: [*(made := ends(self, spans))[:1], *made])
        runs(here, *given)
        return errors, lists, lengths()


def lengths() -> list[list[int]]:
    """Of what was packed."""
    return [call.arguments["actual_seq_qlen"] for call in calls if call.arguments.get("input_layout") == "TND"]
