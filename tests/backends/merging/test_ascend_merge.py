"""Merging on emulated NPUs: npu_attention_update where it is there, keeps fp32, and costs no copy more; else torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend import operators, schemas
from ascend.binding import bind
from ascend.operators import calls, register
from ascend.ranks import NpuPools
from ascend.schemas import OFFERS, RING, WHEELS
from merging import CASES, Case, check, check_kept, check_softmax, parts, scratch_for
from oracle import allowed, attention64
from ranks import Here
from test_ascend_runs import LIMITS, context, runs

from tokenring import Causal, Full, Mask, attention
from tokenring.backends.merging import npu as merge_npu
from tokenring.backends.merging.choice import choose_merger
from tokenring.backends.merging.npu import OPERATOR, UpdateMerger, memory_order

HEAD_DIM = 16
FITTING = {  # cases of the suite in which the operator is called
    "plain", "bf16 comes", "fp16 comes", "a batch", "outputs, bf16", "outputs, fp32", "heads first, both",
    "heads of 128", "three axes", "two axes",
}  # fmt: skip


def choice(head_dim: int = HEAD_DIM) -> tuple[str, str]:
    """Who merges on this rank's NPU; why nobody else."""
    made = choose_merger(torch.empty(0, device="npu").device, head_dim)
    return made.merger.name, "; ".join(f"{name}: {why}" for name, why in made.others)


def updates() -> list[dict[str, Any]]:
    return [call.arguments for call in calls if call.name == OPERATOR]


def fresh(offer: str) -> None:
    """The operators of a wheel, registered anew."""
    register("op-plugin 7.1.0" if offer != "op-plugin 7.1.0" else "2.13.0")
    register(offer)


# ---------- exact


@pytest.mark.parametrize("wheel", WHEELS)
def test_the_suite(npus: NpuPools, wheel: str) -> None:
    assert set(npus(1)(pass_the_suite, wheel)[0]) == FITTING


def pass_the_suite(here: Here, wheel: str) -> list[str]:
    """The cases in which the operator was called. Every call binds to the wheel's signature."""
    register(wheel)
    merger, called = merge_npu.make(), []
    for case in CASES:
        if merger.supports(case.head_dim) is not None:
            assert case.head_dim in (1, 640)
            continue
        calls.clear()
        check(merger, case, "npu")
        called += [case.name] if updates() else []
        for given in updates():
            bind(WHEELS[wheel][OPERATOR], (), given)
            assert {x.dtype for x in given["lse"] + given["local_out"]} == {torch.float32}
    check_kept(merger, "npu")
    check_softmax(merger, 3, "npu")
    return called


MUTANTS: dict[str, tuple[str, Any, str]] = {
    # what of the module is spoilt, how, and a case that finds it
    "-inf goes in": ("LOWEST", -math.inf, "plain"),
    "the lowest comes out": ("EMPTY", -math.inf, "plain"),
    "in the order of axes": ("memory_order", lambda out: list(range(out.dim() - 1)), "outputs, fp32"),
    "no lse asked for": ("WITH_LSE", 0, "plain"),
    "whatever lies how it likes": ("_fits", lambda *_: True, "outputs of batch 1, fp32"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(npus: NpuPools, name: str) -> None:
    npus(1)(spoilt, name)


def spoilt(here: Here, name: str) -> None:
    """Wrong, refused, or (the order of axes) not called any more where it was."""
    register("2.13.0")
    what, how, case_name = MUTANTS[name]
    case = next(each for each in CASES if each.name == case_name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(merge_npu, what, how)
        if what == "memory_order":
            calls.clear()
            check(merge_npu.make(), case, "npu")
            assert not updates()
            return
        with pytest.raises((AssertionError, RuntimeError)):
            check(merge_npu.make(), case, "npu")
            if what == "_fits":  # the emulation copies nothing in silence; a copy that we make is seen here
                assert no_copy_more(merge_npu.make(), case)


def no_copy_more(merger: UpdateMerger, case: Case) -> bool:
    """Whether what goes into the operator is what came, or its conversion."""
    calls.clear()
    given = parts(case, "npu")
    pointer = given[2].data_ptr()
    merger.merged(*given, scratch_for(given[1]))
    return not updates() or updates()[0]["local_out"][1].data_ptr() == pointer


def test_axes_as_they_lie() -> None:
    x = torch.empty(4, 3, 2, 8)
    assert memory_order(x) == [0, 1, 2]
    assert memory_order(x.transpose(0, 1)) == [1, 0, 2]
    assert memory_order(x.permute(2, 1, 0, 3)) == [2, 1, 0]
    assert memory_order(x[:, :1]) == [0, 2, 1]  # an axis of one lies anywhere


# ---------- whole calls


@pytest.mark.parametrize("wheel", ["2.9.1", "2.13.0"])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
@pytest.mark.parametrize(("schedule", "layout"), [("ring", "contiguous"), ("tokenring", "striped")])
def test_whole_results_in_fp32(npus: NpuPools, wheel: str, mask: Mask, schedule: str, layout: str) -> None:
    """By the operator where tiles make them; partials from elsewhere lie between lses, and are torch's. Exact.

    The same in the wheel without npu_ring_attention_update, which nobody asks for.
    """
    found = npus(2)(counted, wheel, schedule, layout, mask, torch.float32)
    assert [merged for _, merged, _ in found] == ([0, 0] if schedule != "ring" else [int(mask == Full()), 1])
    for errors, _, ring in found:
        assert ring == 0
        for name, error in errors.items():
            assert error < LIMITS[torch.float32][name != "out"], name


def counted(here: Here, offer: str, *how: Any) -> tuple[dict[str, float], int, int]:
    """Errors of a call forward and backward, and how often each operator that merges was called."""
    schedule, layout, mask, dtype = how
    register(offer)
    choice()  # the trial's calls are not the call's
    errors = runs(here, offer, schedule, layout, mask, (4, 2), dtype)
    del errors["packed"]
    return errors, len(updates()), sum(call.name == RING for call in calls)


@pytest.mark.parametrize(("wheel", "ring"), [("2.9.1", 0), ("2.13.0", 1)])
def test_a_running_result_in_the_pool_is_torchs(npus: NpuPools, wheel: str, ring: int) -> None:
    """In half precision accumulators lie in the pool, between lses, and stay there.

    Tiles into the same rows, two of each rank here, are merged before that where the wheel has the operator.
    """
    npus(2)(counted, wheel, "ring", "contiguous", Full(), torch.bfloat16)  # the operator's trial
    for errors, merged, updated in npus(2)(counted, wheel, "ring", "contiguous", Full(), torch.bfloat16):
        assert (merged, updated) == (0, ring)
        for name, error in errors.items():
            assert error < LIMITS[torch.bfloat16][name != "out"], name


def test_what_is_taken_stays_where_results_are_wanted(npus: NpuPools) -> None:
    """Calls one after another, with results kept: a replaced result is the caller's own."""
    assert npus(2)(kept_results) == [True, True]


def kept_results(here: Here) -> bool:
    register("2.13.0")
    cp = context(here, schedule="ring", layout="contiguous")
    random = torch.Generator().manual_seed(5)
    kept, wanted = [], []
    for _ in range(3):
        q, k, v = (torch.randn(1, 32, 2, HEAD_DIM, generator=random) for _ in range(3))
        mine = slice(16 * here.rank, 16 * here.rank + 16)
        there = [x[:, mine].to("npu") for x in (q, k, v)]
        kept.append(attention(there[0], there[1], there[2], cp=cp, mask=Full()))
        wanted.append(attention64(q, k, v, q, allowed(Full(), 32, 32)).out[:, mine])
    assert updates()
    return all(bool(torch.allclose(a.cpu().double(), b, atol=1e-5)) for a, b in zip(kept, wanted, strict=True))


# ---------- who is taken


def test_where_it_is_absent(npus: NpuPools) -> None:
    npus(1)(absent)


def absent(here: Here) -> None:
    """Torch merges, says so, and the results are the same."""
    without = {name: text for name, text in OFFERS["2.9.1"].items() if name != OPERATOR}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(schemas.OFFERS, "neither", without)
        fresh("neither")
        name, why = choice()
        assert name == "torch" and f"torch.ops.npu has no {OPERATOR}" in why
    fresh("2.13.0")
    assert choice() == ("npu-update", "")


def test_heads_that_it_does_not_take(npus: NpuPools) -> None:
    npus(1)(odd_heads)


def odd_heads(here: Here) -> None:
    register("2.13.0")
    for head_dim in (4, 20, 520, 768):
        name, why = choice(head_dim)
        assert name == "torch" and f"multiples of 8 up to 512, not {head_dim}" in why
    assert [choice(head_dim)[0] for head_dim in (8, 64, 128, 512)] == ["npu-update"] * 4


def test_an_operator_of_another_form(npus: NpuPools) -> None:
    npus(1)(another_form)


def another_form(here: Here) -> None:
    other = OFFERS["2.13.0"] | {OPERATOR: f"{OPERATOR}(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(schemas.OFFERS, "other", other)
        fresh("other")
        name, why = choice()
    assert name == "torch" and "here (outs, lses)" in why


def in_bf16(real: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    """A mutant of the operator: it accumulates in bf16, and says nothing."""

    def compute(given: Any) -> tuple[Any, ...]:
        out, lse = real(given)
        return out.bfloat16().float(), lse

    return compute


def by_maximum(real: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    """Another: rows that have seen nothing come back as NaN."""

    def compute(given: Any) -> tuple[Any, ...]:
        out, lse = real(given)
        return out.masked_fill((lse < -1e30)[:, None], math.nan), lse

    return compute


@pytest.mark.parametrize("mutant", [in_bf16, by_maximum])
def test_an_operator_that_keeps_no_fp32_is_refused(npus: NpuPools, mutant: Callable[..., Any]) -> None:
    npus(1)(imprecise, mutant)


def imprecise(here: Here, mutant: Callable[..., Any]) -> None:
    """The choice tries it; a call then is as exact as ever, by torch."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(operators.IMPLEMENTED, OPERATOR, mutant(operators.IMPLEMENTED[OPERATOR]))
        fresh("2.13.0")
        name, why = choice()
        assert name == "torch" and "it does not merge in fp32" in why
        with pytest.raises(AssertionError):
            check(merge_npu.make(), CASES[0], "npu")
    fresh("2.13.0")
    assert choice() == ("npu-update", "")
