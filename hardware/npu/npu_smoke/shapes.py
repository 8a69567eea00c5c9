"""Calls as models have them, of kernel npu-fusion: head dims, many heads, batches, odd lengths, a long sequence; and
torch's own merge, of rows that have seen nothing and of statistics that exp cannot take. Rank 0, against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from npu_smoke import kernel
from npu_smoke.here import Here
from npu_smoke.schedules import LIMIT
from tokenring.backends.merging.torch_merger import TorchMerger
from tokenring.sequence.region import Patch

LONG, DRY_LONG = 128 << 10, 512
ROWS = 48  # of a long sequence that are compared
MERGE_LIMIT = 1e-5  # times |lse|, beyond 1: in fp32 that is rounded, and weights are differences of two
NOTHING = -torch.inf
# lse of what is there and of what comes: nothing at either side or both, far apart, and beyond what exp takes in fp32.
LSES = ((NOTHING, NOTHING), (NOTHING, 3.0), (3.0, NOTHING), (0.5, 1.5), (200.0, 199.0), (-200.0, -199.0),
        (-300.0, 300.0), (1e4, 1e4), (-1e4, NOTHING))  # fmt: skip


class Shape(NamedTuple):
    """Of a call: entries of the batch, heads of q and of k and v, tokens, head dim."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    dim: int


SHAPES = {
    "D 128, batch 2": Shape(2, 8, 8, 256, 128), "D 192": Shape(1, 4, 4, 256, 192), "D 256": Shape(1, 4, 4, 256, 256),
    "64 heads, 8 for k and v": Shape(1, 64, 8, 128, 128), "37 tokens": Shape(2, 4, 2, 37, 128),
    "1001 tokens": Shape(1, 2, 1, 1001, 64),
}  # fmt: skip


def shapes(here: Here) -> dict[str, Any]:
    """Causal, forward and backward, in fp32 and bf16; a case that raises is wrong, and takes no other with it."""
    if (reason := kernel.left_out(here)) is not None:
        return reason
    cases: dict[str, Callable[[], dict[str, float]]] = {}
    for dtype in LIMIT:
        word = kernel.word_of(dtype)
        for name, shape in SHAPES.items():
            cases[f"{name}, {word}"] = lambda shape=shape, dtype=dtype: _case(here, shape, dtype)  # type: ignore[misc]
        cases[f"{_long(here)} tokens, {word}"] = lambda dtype=dtype: _long_case(here, dtype)  # type: ignore[misc]
    errors, raised = {}, []
    for name, case in cases.items():
        here.say(name)
        try:
            errors[name] = case()
        except Exception as error:
            raised.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    judged = kernel.judged(errors)
    return {**judged, "wrong": [*judged["wrong"], *raised]}


def _long(here: Here) -> int:
    return DRY_LONG if here.emulated else LONG


def _operands(shape: Shape, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, dout [B, H, S, D] on the CPU."""
    generator = torch.Generator().manual_seed(shape.tokens)
    counts = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    sizes = [(shape.batch, count, shape.tokens, shape.dim) for count in counts]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def _case(here: Here, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    operands = _operands(shape, dtype)
    patch = Patch(0, shape.tokens, 0, shape.tokens, None, 0)
    wanted = kernel.attention64(operands[0], operands[1], operands[2], operands[3], patch)
    q, k, v, dout = (x.to(here.place) for x in operands)
    made, scale = kernel.fusion(), shape.dim**-0.5
    out, lse = made.forward(q, k, v, patch=patch, scale=scale)
    delta = (wanted["out"] * operands[3].double()).sum(-1).float().to(here.place)
    whole = wanted["lse"].float().to(here.place)
    gradients = made.backward(dout, q, k, v, whole, delta, out=None, patch=patch, scale=scale)
    return kernel.errors_of(dict(zip(kernel.NAMES, (out, lse, *gradients), strict=True)), wanted)


def _long_case(here: Here, dtype: torch.dtype) -> dict[str, float]:
    """Of some rows, the last among them: each is a sum over its own keys alone, and so is its row of dq."""
    tokens = _long(here)
    operands = _operands(Shape(1, 2, 1, tokens, 128), dtype)
    patch = Patch(0, tokens, 0, tokens, None, 0)
    q, k, v, dout = (x.to(here.place) for x in operands)
    made, scale = kernel.fusion(), 128**-0.5
    out, lse = made.forward(q, k, v, patch=patch, scale=scale)
    dq = made.backward(dout, q, k, v, lse, None, out=out.to(dtype), patch=patch, scale=scale)[0]
    rows = torch.linspace(0, tokens - 1, ROWS).long()
    wanted = _rows64(operands, rows, scale)
    found = {name: x.cpu()[:, :, rows] for name, x in (("out", out), ("lse", lse), ("dq", dq))}
    return kernel.errors_of(found, wanted)


def _rows64(operands: list[torch.Tensor], rows: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
    """out, lse and dq of these rows of a causal call, in float64."""
    q, dout = (operands[at].double()[:, :, rows] for at in (0, 3))
    k, v = (x.double().repeat_interleave(q.shape[1], dim=1) for x in operands[1:3])
    hidden = torch.arange(k.shape[2]) > rows[:, None]
    scores = (q @ k.mT * scale).masked_fill(hidden, NOTHING)
    weights, out = scores.softmax(-1), scores.softmax(-1) @ v
    gradient = weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return {"out": out, "lse": scores.logsumexp(-1), "dq": gradient @ k * scale}


# ---------- torch's own merge


def torchmerge(here: Here) -> dict[str, Any]:
    """In whole tensors and in records as the pool has them; rows that have seen nothing, statistics far apart."""
    if here.rank:
        return {}
    wrong, worst = [], 0.0
    for layout in (_whole, _records):
        for dtype in (torch.float32, torch.bfloat16):
            errors = _merge_errors(here, layout, dtype)
            worst = max([worst, *(error for error in errors.values() if error == error)])
            case = f"{layout.__name__[1:]}, {kernel.word_of(dtype)}"
            bad = {pair: error for pair, error in errors.items() if not error <= MERGE_LIMIT}  # NaN too
            wrong += [f"{case}, lse {pair}: {error:.1e}" for pair, error in bad.items()]
    return {"error": worst, "wrong": wrong}


def _whole(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out.clone(), lse.clone()


def _records(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """lse and out of a token beside each other, as in the pool: rows far apart."""
    rows, batch, heads, dim = out.shape
    records = torch.zeros(rows, batch * heads * (1 + dim), device=out.device)
    strided = records[:, batch * heads :].view(rows, batch, heads, dim), records[:, : batch * heads].view(lse.shape)
    for view, given in zip(strided, (out, lse), strict=True):
        view.copy_(given)
    return strided


def _merge_errors(here: Here, layout: Any, dtype: torch.dtype) -> dict[tuple[float, float], float]:
    """Of each pair of LSES: the largest of out and lse."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(LSES), 1, 2, 64)  # rows, batch, heads, head dim
    lse, new_lse = (torch.tensor([pair[at] for pair in LSES])[:, None, None].repeat(1, 1, 2) for at in (0, 1))
    out, new_out = (torch.randn(shape, generator=generator) for _ in range(2))
    out[lse == NOTHING] = 0.0  # as kernels give rows that see nothing
    new_out[new_lse == NOTHING] = 0.0
    new_out = new_out.to(dtype)
    mine, mine_lse = layout(out.to(here.place), lse.to(here.place))
    scratch = torch.empty(2, *lse.shape, device=here.place)
    TorchMerger().merge_(mine, mine_lse, new_out.to(here.place), new_lse.to(here.place), scratch)
    right, right_lse = _merged64(out, lse, new_out, new_lse)
    outs = (mine.cpu().double() - right).abs().amax((1, 2, 3))
    lses = torch.where(mine_lse.cpu() == right_lse, 0.0, (mine_lse.cpu() - right_lse).abs()).amax((1, 2))
    scale = torch.where(right_lse.isinf(), 1.0, right_lse.abs().clamp(min=1.0)).amax((1, 2))
    return dict(zip(LSES, ((outs + lses) / scale).tolist(), strict=True))


def _merged64(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.logaddexp(lse.double(), new_lse.double())
    weights = [torch.where(each == NOTHING, 0.0, (each.double() - total).exp())[..., None] for each in (lse, new_lse)]
    return weights[0] * out.double() + weights[1] * new_out.double(), total
