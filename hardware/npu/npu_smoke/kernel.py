"""The kernel npu-fusion itself, on rank 0: a tile, and packed documents in one call, against float64; and merging.

q, dout [B, H, S, D]; k, v [B, fewer heads, S, D].
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from npu_smoke.here import Here
from npu_smoke.operators import has
from npu_smoke.schedules import LIMIT
from tokenring.backends.kernels.reference import dense_mask
from tokenring.sequence.region import Patch

NAMES = ("out", "lse", "dq", "dk", "dv")
Made = dict[str, torch.Tensor]  # by NAMES, on the CPU


def left_out(here: Here) -> dict[str, Any] | None:
    if not has("npu_fusion_attention") and not has("npu_fusion_attention_v2"):
        return {"left out": "there is no npu_fusion_attention here"}
    return {} if here.rank else None


# ---------- a tile


def tile(here: Here) -> dict[str, Any]:
    """Full, causal, a band; two query heads for each other head; by delta and by the output; fp32 and bf16."""
    if (reason := left_out(here)) is not None:
        return reason
    tokens = here.sizes.check[0]
    patches = {
        "full": Patch(0, tokens, 0, tokens),
        "causal": Patch(0, tokens, 0, tokens, None, 0),
        "band": Patch(0, tokens, 0, tokens, -tokens // 4, tokens // 8),
    }
    return judged({f"{name}, {word_of(dtype)}": _tile(here, patch, dtype) for name, patch in patches.items()
                    for dtype in LIMIT})  # fmt: skip


def _tile(here: Here, patch: Patch, dtype: torch.dtype) -> dict[str, float]:
    operands = _operands(here, dtype)
    wanted = attention64(operands[0], operands[1], operands[2], operands[3], patch)
    q, k, v, dout = (x.to(here.place) for x in operands)
    kernel, scale = fusion(), q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, patch=patch, scale=scale)
    errors = errors_of({"out": out, "lse": lse}, wanted)
    # The gradients are of these rows alone, so that their own lse is that of the whole row.
    whole_lse = wanted["lse"].float().to(here.place)
    delta = (wanted["out"] * operands[3].double()).sum(-1).float().to(here.place)
    for how in ({"delta": delta}, {"delta": None, "out": wanted["out"].to(dtype).to(here.place)}):
        made = kernel.backward(dout, q, k, v, whole_lse, how["delta"], out=how.get("out"), patch=patch, scale=scale)
        found = errors_of(dict(zip(NAMES[2:], made, strict=True)), wanted)
        errors |= {name: max(error, errors.get(name, 0.0)) for name, error in found.items()}
    return errors


# ---------- packed documents


def documents(here: Here) -> dict[str, Any]:
    """Four causal documents of unlike lengths, one of a single token, in one call of layout TND each way."""
    if (reason := left_out(here)) is not None:
        return reason
    return judged({word_of(dtype): _documents(here, dtype) for dtype in LIMIT})


def _documents(here: Here, dtype: torch.dtype) -> dict[str, float]:
    operands = _operands(here, dtype)
    tokens = operands[0].shape[2]
    ends = [0, tokens // 4, tokens // 4 + 1, tokens // 2 + 3, tokens]
    patches = [Patch(a, b, a, b, None, 0) for a, b in itertools.pairwise(ends)]
    parts = [[x[:, :, each.row0 : each.row1] for x in operands] for each in patches]
    wants = [attention64(q, k, v, dout, each.shifted(-each.row0, -each.col0))
             for (q, k, v, dout), each in zip(parts, patches, strict=True)]  # fmt: skip
    wanted = {name: torch.cat([each[name] for each in wants], dim=2) for name in NAMES}
    q, k, v, dout = (x.to(here.place) for x in operands)
    kernel, scale = fusion(), q.shape[-1] ** -0.5
    assert kernel.packs(patches)
    forward = kernel.forward_packed(q, k, v, patches=patches, scale=scale)
    delta = (wanted["out"] * operands[3].double()).sum(-1).float().to(here.place)
    lse = wanted["lse"].float().to(here.place)
    backward = kernel.backward_packed(dout, q, k, v, lse, delta, patches=patches, scale=scale)
    made = [torch.cat(each, dim=2) for made in (forward, backward) for each in zip(*made, strict=True)]
    return errors_of(dict(zip(NAMES, made, strict=True)), wanted)


# ---------- what both need


def fusion() -> Any:
    from tokenring.backends.kernels.npu_fusion import NpuFusion

    return NpuFusion()


def _operands(here: Here, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, dout on the CPU."""
    tokens, heads, dim = here.sizes.check
    generator = torch.Generator().manual_seed(2)
    shapes = [(1, count, tokens, dim) for count in (heads, heads // 2, heads // 2, heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attention64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, patch: Patch) -> Made:
    """In float64, gradients by autograd."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in leaves[1:]]
    scores = leaves[0] @ wide[0].mT * q.shape[-1] ** -0.5
    visible = dense_mask(patch, q.device)
    scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    out = scores.softmax(-1) @ wide[1]
    gradients = torch.autograd.grad(out, leaves, dout.double())
    made = (out, scores.logsumexp(-1), *gradients)
    return {name: x.detach() for name, x in zip(NAMES, made, strict=True)}


def errors_of(made: Made, wanted: Made) -> dict[str, float]:
    """Relative, in the Frobenius norm."""
    return {
        name: float((x.cpu().double() - wanted[name]).norm() / wanted[name].norm()) for name, x in made.items()
    }


def word_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def judged(errors: dict[str, dict[str, float]]) -> dict[str, Any]:
    """errors: by case, whose name ends in its dtype."""
    limits = {word_of(dtype): limit for dtype, limit in LIMIT.items()}
    wrong = [
        f"{name} of {case}: {error:.1e}"
        for case, found in errors.items()
        for name, error in found.items()
        if not error <= limits[case.rpartition(" ")[2]]  # NaN too
    ]
    worst = {
        word: max((max(found.values()) for case, found in errors.items() if case.endswith(word)), default=0.0)
        for word in limits
    }
    return {"errors": errors, "worst": worst, "wrong": wrong}


# ---------- merging


def merges(here: Here) -> dict[str, Any]:
    """Seconds of a merge of whole results in fp32, by torch and by npu_attention_update; who is taken, and why."""
    if not has("npu_attention_update"):
        return {"left out": "there is no npu_attention_update here"}
    from tokenring.backends.merging.choice import choose_merger
    from tokenring.backends.merging.npu import make
    from tokenring.backends.merging.torch_merger import TorchMerger

    tokens, heads, dim = here.sizes.timed
    made = choose_merger(here.place, dim)
    found: dict[str, Any] = {
        "taken": made.merger.name, "why": "; ".join([made.why, *(why for _, why in made.others)]), "seconds": {},
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        out, new_out = (torch.randn(1, tokens, heads, dim).to(here.place).transpose(0, 1) for _ in range(2))
        lse, new_lse = (torch.randn(1, heads, tokens).to(here.place).permute(2, 0, 1) for _ in range(2))
        scratch = torch.empty(2, tokens, 1, heads, device=here.place)
        given = (out, lse, new_out.to(dtype), new_lse, scratch)
        found["seconds"][word_of(dtype)] = {
            merger.name: here.timed(lambda merger=merger, given=given: merger.merged(*given))  # type: ignore[misc]
            for merger in (TorchMerger(), make())
        }
    return found
