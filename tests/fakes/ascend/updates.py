"""The two operators that merge partial results: by log-sum-exp, and by maximum and sum."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ascend.golden import COPIES
from ascend.layouts import copies, pack_statistics, unpack_statistics
from ascend.refusals import DTYPES, refuse

Given = dict[str, Any]
MOST_PARTIALS = 16


def attention_update(given: Given) -> tuple[Any, Any]:
    """out [M, D] of lse_i [M] and out_i [M, D], in float64, rounded once to the dtype of the outs."""
    lses, outs, update = given["lse"], given["local_out"], given["update_type"]
    refuse(not 1 <= len(lses) <= MOST_PARTIALS, f"{len(lses)} partials; 1 to {MOST_PARTIALS} are merged at once")
    refuse(len(lses) != len(outs), f"{len(lses)} lse, {len(outs)} outs")
    refuse(update not in (0, 1), f"update_type {update} is neither 0 nor 1")
    rows, head_dim = outs[0].shape
    refuse(head_dim % 8 != 0 or not 8 <= head_dim <= 512, f"head dim {head_dim}: a multiple of 8 up to 512")
    for lse, out in zip(lses, outs, strict=True):
        refuse(lse.dtype != torch.float32 or tuple(lse.shape) != (rows,), "lse must be fp32 [B·S·N]")
        refuse(out.dtype not in DTYPES or out.dtype != outs[0].dtype, "outs must share fp32, fp16 or bf16")
        refuse(out.shape != outs[0].shape, "outs differ in shape")
        refuse(not (lse.is_contiguous() and out.is_contiguous()), "lse and outs must be contiguous")
    stacked = torch.stack([x for x in lses]).double()
    total = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - total)
    merged = sum(w[:, None] * x.double() for w, x in zip(weights, outs, strict=True))
    assert isinstance(merged, torch.Tensor)
    kept = total.float() if update == 1 else torch.full((rows,), float("nan"))  # then only out is valid
    return merged.to(outs[0].dtype), kept


def ring_attention_update(given: Given) -> tuple[Any, Any, Any]:
    """out, maximum and sum of two partial results, rounded to the dtype of the outs at every call."""
    layout = given["input_layout"]
    refuse(layout not in ("SBH", "TND"), f"input_layout is SBH or TND, not {layout!r}")
    before = _partial(given, "prev", layout)
    after = _partial(given, "cur", layout)
    refuse(before[0].shape != after[0].shape or before[0].dtype != after[0].dtype, "the two outs differ")
    dtype = given["prev_attn_out"].dtype
    refuse(before[1].shape != after[1].shape, "the two statistics differ in shape")
    largest = torch.maximum(before[1], after[1])
    parts = [(out, total * torch.exp(most - largest)) for out, most, total in (before, after)]
    total = parts[0][1] + parts[1][1]
    merged = sum(out * (weight / total)[..., None] for out, weight in parts)
    assert isinstance(merged, torch.Tensor)
    out = (merged.permute(2, 0, 1, 3).flatten(2) if layout == "SBH" else merged).to(dtype).contiguous()
    return out, _statistics(given, largest, layout), _statistics(given, total, layout)


def _partial(given: Given, which: str, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out [B, N, S, D] with statistics [B, N, S], or [T, N, D] with [T, N]; float64."""
    out = given[f"{which}_attn_out"]
    refuse(out.dim() != 3 or out.dtype not in DTYPES, f"{which}_attn_out must have 3 dimensions, in fp16, bf16 or fp32")
    found = []
    for name in (f"{which}_softmax_max", f"{which}_softmax_sum"):
        x = given[name]
        refuse(x.dtype != torch.float32 or x.shape[-1] != COPIES, f"{name} must be fp32 with {COPIES} copies")
        refuse(x.dim() != (4 if layout == "SBH" else 3), f"{name} has {x.dim()} dimensions for {layout}")
        found.append(_unpacked(given, x, layout).double())
    inner = out.double()
    if layout == "SBH":
        heads = found[0].shape[1]
        inner = inner.reshape(*inner.shape[:2], heads, -1).permute(1, 2, 0, 3)
    return inner, found[0], found[1]


def _unpacked(given: Given, x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "SBH" or given["input_softmax_layout"] == "TND":
        return x[..., 0]
    return torch.cat([part.transpose(0, 1) for part in unpack_statistics(x, _lengths(given, x.shape[0]), "")])


def _statistics(given: Given, x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "SBH" or given["input_softmax_layout"] == "TND":
        return copies(x)
    parts = [part.transpose(0, 1) for part in torch.split(x, _lengths(given, x.shape[0]))]
    return pack_statistics(parts, x.shape[0], "")


def _lengths(given: Given, tokens: int) -> list[int]:
    """Of the sequences, from a device tensor of int64 with a leading 0."""
    ends = given["actual_seq_qlen"]
    refuse(ends is None, "TND needs actual_seq_qlen, an int64 tensor on the device")
    refuse(ends.dtype != torch.int64, f"actual_seq_qlen must be int64, not {ends.dtype}")
    bounds: list[int] = ends.tolist()
    refuse(bounds[0] != 0 or bounds[-1] != tokens, f"actual_seq_qlen {bounds} must go from 0 to {tokens}")
    return [stop - start for start, stop in pairwise(bounds)]
