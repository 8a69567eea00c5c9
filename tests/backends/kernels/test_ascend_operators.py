"""The emulated operators: right where they compute, strict where they refuse, odd where the hardware is odd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ascend import golden
from ascend.operators import calls, register
from ascend.ranks import NpuPools
from oracle import attention64, relative_error
from ranks import Here

SIDE = 2048
LOWEST = torch.finfo(torch.float32).min
OPERATORS = torch.ops.npu


def triangle() -> torch.Tensor:
    return torch.ones(SIDE, SIDE, dtype=torch.bool, device="npu").triu(1)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to("npu")


def lse_of(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return (largest + total.log())[..., 0]


def pairs(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows)[:, None], torch.arange(cols)[None, :]


def visible_in(mode: int, rows: int, cols: int, before: int, after: int, prefix: int) -> torch.Tensor:
    """The table of modes, written apart from sparse.py."""
    i, j = pairs(rows, cols)
    if mode == 0:
        return (j <= i + after) & (j >= i - before)
    if mode == 2:
        return j <= i
    if mode == 4:
        return (j <= i + after + cols - rows) & (j >= i - before + cols - rows)
    causal = j <= i + (cols - rows)
    return causal | (j < prefix) if mode in (5, 6) else causal


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize(("mode", "rows", "cols"), [
    (0, 12, 12), (1, 9, 14), (2, 10, 13), (3, 10, 13), (4, 10, 13), (5, 10, 13), (6, 12, 12), (None, 7, 9),
])  # fmt: skip
def test_modes(npus: NpuPools, mode: int | None, rows: int, cols: int, layout: str) -> None:
    npus(1)(one_mode, mode, rows, cols, layout)


def arranged(x: torch.Tensor, layout: str) -> torch.Tensor:
    """From [B, S, N, D]."""
    if layout == "BNSD":
        return x.transpose(1, 2).contiguous()
    if layout == "BSND":
        return x
    return x.flatten(2) if layout == "BSH" else x.transpose(0, 1).contiguous().flatten(2)


def one_mode(here: Here, mode: int | None, rows: int, cols: int, layout: str) -> None:
    register("2.13.0")
    q, dout, k, v = draw(2, rows, 4, 8), draw(2, rows, 4, 8) + 1, draw(2, cols, 2, 8), draw(2, cols, 2, 8) * 2
    before, after, prefix = 3, 2, 5
    visible = torch.ones(rows, cols, dtype=torch.bool)
    options: dict[str, Any] = {}
    if mode == 1:
        visible = torch.rand(rows, cols, generator=torch.Generator().manual_seed(1)) < 0.5
        visible[:, 0] = True
    elif mode is not None:
        visible = visible_in(mode, rows, cols, before, after, prefix)
    if mode is not None:
        mask = ~visible.to("npu") if mode in (0, 1, 5) else triangle()
        mask = torch.zeros(3072, SIDE, dtype=torch.bool, device="npu") if mode == 6 else mask
        options = {"atten_mask": mask, "sparse_mode": mode}
    if mode in (0, 4):
        options |= {"pre_tockens": before, "next_tockens": after}
    if mode in (5, 6):
        options |= {"prefix": [prefix, prefix]}
    wanted = attention64(q.cpu(), k.cpu(), v.cpu(), dout.cpu(), visible, 0.3)
    given = [arranged(x, layout) for x in (q, k, v)]
    out, largest, total = OPERATORS.npu_fusion_attention(*given, 4, layout, scale=0.3, **options)[:3]
    assert out.shape == given[0].shape and largest.shape == total.shape == (2, 4, rows, 8)
    assert relative_error(out.cpu(), arranged(wanted.out, layout)) < 1e-7
    assert relative_error(lse_of(largest, total).cpu(), wanted.lse) < 1e-7
    made = OPERATORS.npu_fusion_attention_grad(
        *given, arranged(dout, layout), 4, layout, softmax_max=largest, softmax_sum=total, attention_in=out,
        scale_value=0.3, **options,
    )  # fmt: skip
    for got, right in zip(made, (wanted.dq, wanted.dk, wanted.dv), strict=False):
        assert relative_error(got.cpu(), arranged(right, layout)) < 1e-6


@pytest.mark.parametrize(("mode", "treated"), [("band", True), ("inner_precise", True), ("explicit", False)])
def test_rows_with_every_key_masked(npus: NpuPools, mode: str, treated: bool) -> None:
    npus(1)(masked_rows, mode, treated)


def masked_rows(here: Here, mode: str, treated: bool) -> None:
    register("2.13.0")
    q, v = draw(1, 2, 8, 4), draw(1, 2, 5, 4)
    hidden = torch.zeros(8, 5, dtype=torch.bool)
    hidden[:3] = True
    i, j = pairs(8, 5)
    options: dict[str, Any] = {"atten_mask": hidden.to("npu"), "sparse_mode": 1}
    if mode == "band":
        options, hidden = {"atten_mask": triangle(), "sparse_mode": 3}, j > i + (5 - 8)
    elif mode == "inner_precise":
        options["inner_precise"] = 2
    out, largest, total = OPERATORS.npu_fusion_attention(q, v, v, 2, "BNSD", **options)[:3]
    assert bool((largest[:, :, :3] == LOWEST).all())
    if treated:
        assert bool((out[:, :, :3] == 0).all()) and bool((total[:, :, :3] == -LOWEST).all())
    else:
        torch.testing.assert_close(out[:, :, :3].cpu(), v.mean(2, keepdim=True).expand(1, 2, 3, 4).cpu())
        assert bool((total[:, :, :3] == 5).all())
    assert bool((lse_of(largest, total)[:, :, :3] < -1e30).all()) and bool((largest[:, :, 3:] > -1e30).all())


# ---------- packed sequences


LENGTHS = [(3, 3), (2, 4), (0, 0), (5, 5), (1, 1)]
TAIL = 4  # tokens of sequences that are skipped


def ends(lengths: list[int], skipped: int) -> list[int]:
    made = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return [*made, *[0] * skipped]


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
@pytest.mark.parametrize("mode", [None, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("skipped", [0, 2])
def test_packed(npus: NpuPools, softmax_layout: str, mode: int | None, skipped: int) -> None:
    npus(1)(packed, softmax_layout, mode, skipped)


def packed(here: Here, softmax_layout: str, mode: int | None, skipped: int) -> None:
    """Sequences of unequal lengths, one of them empty, some skipped at the end; forward and backward."""
    register("2.14.0")
    rows, cols = (sum(each) for each in zip(*LENGTHS, strict=True))
    more = TAIL if skipped else 0
    q, dout = draw(rows + more, 4, 8), draw(rows + more, 4, 8) * 2
    k, v = draw(cols + more, 2, 8), draw(cols + more, 2, 8) + 1
    q_ends, kv_ends = (ends(list(each), skipped) for each in zip(*LENGTHS, strict=True))
    options: dict[str, Any] = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": kv_ends, "softmax_layout": softmax_layout}
    if mode is not None:
        options |= {"atten_mask": triangle(), "sparse_mode": mode}
    band = {"pre_tockens": 2, "next_tockens": 1} if mode in (4, 7, 8) else {}
    made = OPERATORS.npu_fusion_attention(q, k, v, 4, "TND", scale=0.3, **options, **band)
    out, largest, total = made[:3]
    grads = OPERATORS.npu_fusion_attention_grad(
        q, k, v, dout, 4, "TND", softmax_max=largest, softmax_sum=total, attention_in=out, scale_value=0.3,
        **options, **band,
    )  # fmt: skip
    stored = largest.cpu()[..., 0].flatten(), total.cpu()[..., 0].flatten()
    q0 = kv0 = 0
    for index, (height, width) in enumerate(LENGTHS):
        if height:
            own = 4 if index == {7: 4, 8: 0}.get(mode or 0) else {7: 3, 8: 2}.get(mode or 0, mode)
            visible = torch.ones(height, width, dtype=torch.bool)
            visible = visible if own is None else visible_in(own, height, width, 2, 1, 0)
            part = [x.cpu()[None, at : at + size] for x, at, size in
                    ((q, q0, height), (k, kv0, width), (v, kv0, width), (dout, q0, height))]  # fmt: skip
            wanted = attention64(part[0], part[1], part[2], part[3], visible, 0.3)
            assert relative_error(out.cpu()[q0 : q0 + height], wanted.out[0]) < 1e-7
            block = slice(4 * q0, 4 * (q0 + height))
            blocks = [x[block].view(4, height) if softmax_layout == "" else x[block].view(height, 4).T for x in stored]
            assert relative_error(blocks[0] + blocks[1].log(), wanted.lse[0]) < 1e-7
            assert relative_error(grads[0].cpu()[q0 : q0 + height], wanted.dq[0]) < 1e-6
            assert relative_error(grads[1].cpu()[kv0 : kv0 + width], wanted.dk[0]) < 1e-6
            assert relative_error(grads[2].cpu()[kv0 : kv0 + width], wanted.dv[0]) < 1e-6
        q0, kv0 = q0 + height, kv0 + width
    assert all(bool(x.cpu()[rows:].isnan().all()) for x in (out, grads[0]))  # what was skipped is nobody's business
    assert all(bool(x.cpu()[cols:].isnan().all()) for x in grads[1:3])


# ---------- merging


def test_merging_by_log_sum_exp_and_by_maximum_and_sum(npus: NpuPools) -> None:
    npus(1)(merging)


def merging(here: Here) -> None:
    register("2.13.0")
    q, k, v = draw(6, 1, 2, 64), draw(10, 1, 2, 64), draw(10, 1, 2, 64) + 1
    parts = []
    for piece in (slice(0, 4), slice(4, 10)):
        given = [arranged(x.transpose(0, 1), "SBH") for x in (q, k[piece], v[piece])]
        parts.append(OPERATORS.npu_fusion_attention(*given, 2, "SBH", scale=0.1)[:3])
    rows = [x.cpu().transpose(0, 1) for x in (q, k, v)]
    right = attention64(rows[0], rows[1], rows[2], rows[0], torch.ones(6, 10, dtype=torch.bool), 0.1)
    out, largest, total = OPERATORS.npu_ring_attention_update(*parts[0], *parts[1], input_layout="SBH")
    assert relative_error(out.cpu(), arranged(right.out, "SBH")) < 2e-7
    assert relative_error(lse_of(largest, total).cpu(), right.lse) < 2e-7
    lses = [lse_of(each[1], each[2]).flatten().contiguous() for each in parts]
    outs = [each[0].view(6, 1, 2, 64).permute(1, 2, 0, 3).reshape(-1, 64).contiguous() for each in parts]
    merged, lse = OPERATORS.npu_attention_update(lses, outs, 1)
    assert relative_error(merged.cpu(), right.out.transpose(1, 2).reshape(-1, 64)) < 2e-7
    assert relative_error(lse.cpu(), right.lse.flatten()) < 2e-7
    assert bool(OPERATORS.npu_attention_update(lses, outs, 0)[1].cpu().isnan().all())  # asked for without lse


# ---------- refusals


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lower-case layout": ({"input_layout": "bnsd"}, "input_layout should be one of"),
    "layout of three dimensions": ({"input_layout": "SBH"}, "layout SBH has 3 dimensions, not 4"),
    "dtypes differ": ({"key": lambda: draw(1, 2, 6, 8, dtype=torch.bfloat16)}, "key is torch.bfloat16"),
    "float64": ({name: lambda: draw(1, 2, 6, 8).double() for name in ("query", "key", "value")}, "is torch.float64"),
    "no heads": ({"head_num": 0}, "head_num must be greater than 0"),
    "heads of k": ({"head_num": 3}, "head_num is 3, query has 2"),
    "heads that do not divide": ({"key": lambda: draw(1, 3, 6, 8), "value": lambda: draw(1, 3, 6, 8)}, "no multiple"),
    "head dim": ({name: lambda: draw(1, 2, 6, 769) for name in ("query", "key", "value")}, "head dim 769"),
    "CPU tensor": ({"key": lambda: torch.zeros(1, 2, 6, 8)}, "Expected NPU tensor"),
    "CPU mask": ({"atten_mask": lambda: torch.zeros(6, 6, dtype=torch.bool), "sparse_mode": 1}, "Expected NPU tensor"),
    "dropout of all": ({"keep_prob": 0.0}, "keep_prob value must be in range"),
    "dropout": ({"keep_prob": 0.5}, "computes no dropout"),
    "small mask": ({"atten_mask": lambda: draw(6, 6) > 0, "sparse_mode": 3}, r"takes a mask of \[2048, 2048\]"),
    "mask the wrong way": ({"atten_mask": lambda: ~triangle(), "sparse_mode": 3}, "True is hidden"),
    "float mask": ({"atten_mask": lambda: draw(6, 6), "sparse_mode": 1}, "must be bool or uint8"),
    "mask of another shape": ({"atten_mask": lambda: draw(6, 7) > 0, "sparse_mode": 1}, "takes a mask of one of"),
    "mode 7 unpacked": ({"atten_mask": triangle, "sparse_mode": 7}, "sparse_mode 7 does not go with BNSD"),
    "mask against band": (
        {"atten_mask": lambda: draw(6, 6) > 9, "sparse_mode": 0, "next_tockens": 0}, "must hide what lies outside",
    ),
    "empty band": ({"atten_mask": triangle, "sparse_mode": 4, "pre_tockens": -3, "next_tockens": 0}, "leave nothing"),
    "TND statistics unpacked": ({"softmax_layout": "TND"}, "goes with input_layout TND only"),
    "lengths unpacked": ({"actual_seq_qlen": [6]}, "go with TND only"),
    "prefix without mode": ({"prefix": [2]}, "prefix goes with sparse modes 5 and 6"),
    "strided": ({"query": lambda: draw(1, 6, 2, 8).transpose(1, 2)}, "not contiguous"),
}  # fmt: skip
PACKED_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no lengths": ({"actual_seq_qlen": None}, "TND needs actual_seq_qlen"),
    "leading 0": ({"actual_seq_qlen": [0, 2, 6], "actual_seq_kvlen": [0, 2, 6]}, "begins with 0"),
    "not as many": ({"actual_seq_qlen": [6]}, "1 sequences of queries, 2 of keys"),
    "decreasing": ({"actual_seq_qlen": [7, 6]}, "decreases"),
    "too few tokens": ({"actual_seq_qlen": [2, 5]}, "ends at 5, and there are 6"),
    "queries without keys": ({"actual_seq_kvlen": [6, 6]}, "4 queries and no keys"),
    "mode 5": ({"atten_mask": triangle, "sparse_mode": 5}, "does not go with TND"),
    "mode 3, tall": ({"atten_mask": triangle, "sparse_mode": 3, "actual_seq_kvlen": [3, 6]}, "of 4 queries, 3 keys"),
    "unknown order": ({"softmax_layout": "BNS"}, "should be '' or 'TND'"),
}


@pytest.mark.parametrize("name", [*REFUSED, *PACKED_REFUSED])
def test_refuses(npus: NpuPools, name: str) -> None:
    npus(1)(refusal, name)


def refusal(here: Here, name: str) -> None:
    register("2.13.0")
    shape, given = ((1, 2, 6, 8), {"input_layout": "BNSD"}) if name in REFUSED else (
        (6, 2, 8), {"input_layout": "TND", "actual_seq_qlen": [2, 6], "actual_seq_kvlen": [2, 6]},
    )  # fmt: skip
    good: dict[str, Any] = {"query": draw(*shape), "key": draw(*shape), "value": draw(*shape), "head_num": 2, **given}
    OPERATORS.npu_fusion_attention(**good)
    change, says = (REFUSED | PACKED_REFUSED)[name]
    bad = good | {key: value() if callable(value) else value for key, value in change.items()}
    with pytest.raises(RuntimeError, match=says):
        OPERATORS.npu_fusion_attention(**bad)


GRADIENT_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no output": ({"attention_in": None}, "attention_in is missing"),
    "statistics of one copy": ({"softmax_max": lambda: draw(1, 2, 6, 1)}, r"softmax_max is \[1, 2, 6, 1\]"),
    "copies that differ": ({"softmax_sum": lambda: draw(1, 2, 6, 8)}, "its 8 copies differ"),
    "infinite": ({"softmax_max": lambda: torch.full((1, 2, 6, 8), -math.inf, device="npu")}, "holds inf or nan"),
    "half": ({"softmax_max": lambda: torch.zeros(1, 2, 6, 8, device="npu").half()}, "must be float32"),
    "output in another dtype": ({"attention_in": lambda: draw(1, 2, 6, 8).half()}, "attention_in is torch.float16"),
}


@pytest.mark.parametrize("name", GRADIENT_REFUSED)
def test_gradient_refuses(npus: NpuPools, name: str) -> None:
    npus(1)(gradient_refusal, name)


def gradient_refusal(here: Here, name: str) -> None:
    register("2.13.0")
    x, ones = draw(1, 2, 6, 8), torch.ones(1, 2, 6, 8, device="npu")
    good: dict[str, Any] = {"softmax_max": ones * 0, "softmax_sum": ones, "attention_in": x}
    OPERATORS.npu_fusion_attention_grad(x, x, x, x, 2, "BNSD", **good)
    change, says = GRADIENT_REFUSED[name]
    bad = good | {key: value() if callable(value) else value for key, value in change.items()}
    with pytest.raises(RuntimeError, match=says):
        OPERATORS.npu_fusion_attention_grad(x, x, x, x, 2, "BNSD", **bad)


def test_only_what_the_wheel_holds(npus: NpuPools) -> None:
    assert npus(1)(held, "2.9.1") == [False] and npus(1)(held, "2.7.1.post11") == [True]


def held(here: Here, offer: str) -> bool:
    register(offer)
    x = draw(1, 2, 6, 8)
    with pytest.raises(RuntimeError, match="Unknown keyword argument"):
        OPERATORS.npu_fusion_attention(x, x, x, 2, "BNSD", pre_tokens=3)
    assert OPERATORS.npu_fusion_attention(x, x, x, 2, "BNSD")[4:] == (0, 0, 0)
    assert [each.name for each in calls] == ["npu_fusion_attention"]
    with pytest.raises(RuntimeError, match="Expected NPU tensor"):
        OPERATORS.npu_fusion_attention(*[torch.zeros(1, 2, 6, 8)] * 3, 2, "BNSD")
    return hasattr(OPERATORS, "npu_ring_attention_update")


def test_results_are_rounded_to_the_operands_dtype(npus: NpuPools) -> None:
    npus(1)(rounded)


def rounded(here: Here) -> None:
    register("2.13.0")
    x = draw(1, 2, 16, 8, dtype=torch.bfloat16)
    out, largest, total = OPERATORS.npu_fusion_attention(x, x, x, 2, "BNSD")[:3]
    assert (out.dtype, largest.dtype, total.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    made = golden.forward(x.cpu(), x.cpu(), x.cpu(), None, 1.0, False)
    assert torch.equal(out.cpu(), made.out.bfloat16())
    assert largest.shape[-1] == 8 and bool((largest == largest[..., :1]).all())
