"""What the operators do where documents are silent or differ: rank 0 asks torch.ops.npu itself.

T tokens, N heads, D head dim; statistics come eight times a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from npu_smoke.here import Here

LOWEST, HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
N, D = 2, 64
TOLERANCE = 1e-3  # of what one fp32 call gives
RUNS = 5
MASK = 2048  # rows and columns of the mask that compressed modes take


def has(name: str) -> bool:
    return hasattr(torch.ops.npu, name)


def operator(name: str) -> Any:
    return getattr(torch.ops.npu, name).default


def arguments(name: str) -> list[str]:
    return [each.name for each in operator(name)._schema.arguments]


def _left_out(here: Here, *names: str) -> dict[str, Any] | None:
    """Why there is nothing to ask, on this device or rank."""
    if missing := [name for name in names if not has(name)]:
        return {"left out": f"there is no {', '.join(missing)} here"}
    return {} if here.rank else None


def _inputs(here: Here, tokens_q: int, tokens_kv: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens_q)
    q, k, v = (torch.randn(1, N, tokens, D, generator=generator) for tokens in (tokens_q, tokens_kv, tokens_kv))
    return q.to(here.place), k.to(here.place), v.to(here.place)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str = "BNSD", **how: Any) -> list[torch.Tensor]:
    """out, maximum and sum, on the CPU."""
    heads = q.shape[1]
    made = operator("npu_fusion_attention")(q, k, v, heads, layout, scale=D**-0.5, **how)
    return [x.cpu() for x in made[:3]]


def _scores(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    scores: torch.Tensor = q.cpu().double() @ k.cpu().double().mT * D**-0.5
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _near(a: torch.Tensor, b: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool(((a.double() - b.double()).norm() <= tolerance * b.double().norm().clamp(min=1e-30)).item())


def _parts(x: torch.Tensor, lengths: tuple[int, ...], dim: int = 0) -> list[torch.Tensor]:
    """One after another along an axis."""
    ends = list(accumulate(lengths))
    return [x.narrow(dim, end - length, length) for end, length in zip(ends, lengths, strict=True)]


def _triangle(here: Here) -> torch.Tensor:
    return torch.ones(MASK, MASK, dtype=torch.bool).triu(1).to(here.place)


# ---------- rows with every key masked, statistics


def rows(here: Here) -> dict[str, Any]:
    """Wholly masked rows in both ways of masking, a mode without a mask, and the statistics of seen rows."""
    if (reason := _left_out(here, "npu_fusion_attention")) is not None:
        return reason
    q, k, v = _inputs(here, 64, 64)
    hidden = torch.zeros(64, 64, dtype=torch.bool)
    hidden[0] = True
    explicit = _forward(q, k, v, atten_mask=hidden.to(here.place), sparse_mode=1)
    longer = _inputs(here, 96, 64)
    diagonal = _forward(*longer, atten_mask=_triangle(here), sparse_mode=3)
    without = _forward(q, k, v, sparse_mode=3)
    whole = _scores(q, k).softmax(-1) @ v.cpu().double()
    largest, total = without[1].double(), without[2].double()
    lse = _scores(q, k).logsumexp(-1)
    equal = bool((without[1] == without[1][..., :1]).all() and (without[2] == without[2][..., :1]).all())
    return {
        "mode 1": _row(explicit, v, 64),
        "mode 3": _row(diagonal, longer[2], 64),
        "no mask is full": _near(without[0], whole),
        "statistics": equal and _near(largest[..., 0] + total[..., 0].log(), lse),
    }


def _row(made: list[torch.Tensor], v: torch.Tensor, keys: int) -> dict[str, str]:
    """What the first row is, in words."""
    out, largest, total = (x[0, 0, 0].double() for x in made)
    mean = v.cpu().double()[0, 0].mean(0)
    said = "zero" if not out.any() else "mean of v" if _near(out, mean) else f"norm {out.norm().item():.3g}"
    return {"out": said, "largest": _named(largest[0].item(), keys), "total": _named(total[0].item(), keys)}


def _named(value: float, keys: int) -> str:
    for known, name in ((LOWEST, "lowest fp32"), (HIGHEST, "highest fp32"), (float(keys), "number of keys")):
        if value == known or (abs(known) > 1e30 and abs(value / known - 1) < 1e-3):
            return name
    return f"{value:.6g}"


# ---------- packed sequences


def packed(here: Here) -> dict[str, Any]:
    """How the statistics of two packed sequences lie, by default and as asked for; and which the gradient takes.

    op-plugin asks CANN for a kernel of its own for each direction when softmax_layout is given, and refuses where that
    is absent (FlashAttentionKernelNpuOpApi.cpp of 517f2e7d: 575-589, 899-914, 1175-1189): each is tried by itself.
    """
    if (reason := _left_out(here, "npu_fusion_attention")) is not None:
        return reason
    order: dict[str, str] = {}
    gradient: dict[str, str] = {}
    case = _Packed(here)
    for layout in ("", "TND"):
        if not layout or "softmax_layout" in arguments("npu_fusion_attention"):
            order[layout] = _or_refusal(partial(case.order, layout))
        taken = has("npu_fusion_attention_grad")
        if taken and (not layout or "softmax_layout" in arguments("npu_fusion_attention_grad")):
            gradient[layout] = _or_refusal(partial(case.gradient, layout))
    return {"order": order, "gradient": gradient}


def _or_refusal(act: Callable[[], str]) -> str:
    try:
        return act()
    except RuntimeError as error:
        return f"refused: {' '.join(str(error).split())[:200]}"


class _Packed:
    """Two sequences of 3 and 5 tokens, not masked."""

    lengths, ends = (3, 5), (3, 8)

    def __init__(self, here: Here) -> None:
        self._place = here.place
        self._q, self._k, self._v = (x[0].transpose(0, 1).contiguous() for x in _inputs(here, 8, 8))  # [T, N, D]
        self._dout = torch.randn(8, N, D, generator=torch.Generator().manual_seed(9)).to(here.place)

    def order(self, layout: str) -> str:
        """In which the statistics of forward lie."""
        parts = zip(_parts(self._q, self.lengths), _parts(self._k, self.lengths), strict=True)
        wanted = torch.cat([_scores(a.transpose(0, 1), b.transpose(0, 1)).amax(-1).T for a, b in parts])
        by_sequence = torch.cat([part.T.reshape(-1) for part in _parts(wanted, self.lengths)])
        found = _forward(self._q, self._k, self._v, "TND", **self._how(layout))[1][..., 0].reshape(-1)
        known = {"by token": wanted.reshape(-1), "by sequence": by_sequence}
        return next((name for name, each in known.items() if _near(found, each)), "in another order")

    def gradient(self, layout: str) -> str:
        """Whether it is right with statistics in that order: by token if asked for, by sequence if not."""
        wanted, outs, statistics = self._in_float64()
        packed = [self._as_asked(each, layout) for each in statistics]
        made = operator("npu_fusion_attention_grad")(
            self._q, self._k, self._v, self._dout, N, "TND", softmax_max=packed[0], softmax_sum=packed[1],
            attention_in=outs, scale_value=D**-0.5, **self._how(layout),
        )  # fmt: skip
        return "right" if all(_near(x.cpu(), y) for x, y in zip(made[:3], wanted, strict=True)) else "wrong"

    def _how(self, layout: str) -> dict[str, Any]:
        lengths = {"actual_seq_qlen": list(self.ends), "actual_seq_kvlen": list(self.ends)}
        return lengths | ({"softmax_layout": layout} if layout else {})

    def _as_asked(self, statistic: torch.Tensor, layout: str) -> torch.Tensor:
        """[T, N] as [T, N, 8] in memory of that order."""
        flat = torch.cat([part.T.reshape(-1) for part in _parts(statistic, self.lengths)])
        lies = statistic.reshape(-1) if layout else flat
        return lies.reshape(-1, 1).expand(-1, 8).reshape(8, N, 8).contiguous().float().to(self._place)

    def _in_float64(self) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        """dq, dk, dv; the output on the device; maximum and sum [T, N]."""
        leaves = [x.cpu().double().requires_grad_() for x in (self._q, self._k, self._v)]
        outs, largest, total = [], [], []
        for q, k, v in zip(*(_parts(x, self.lengths) for x in leaves), strict=True):
            scores = _scores(q.transpose(0, 1), k.transpose(0, 1))
            outs.append((scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1))
            largest.append(scores.detach().amax(-1).T)
            total.append((scores.detach() - scores.detach().amax(-1, keepdim=True)).exp().sum(-1).T)
        out = torch.cat(outs)
        wanted = list(torch.autograd.grad(out, leaves, self._dout.cpu().double()))
        return wanted, out.detach().float().to(self._place), [torch.cat(largest), torch.cat(total)]


# ---------- determinism


def determinism(here: Here) -> dict[str, Any]:
    """How many of some repeated gradients are not what the first one was, to the bit."""
    if (reason := _left_out(here, "npu_fusion_attention", "npu_fusion_attention_grad")) is not None:
        return reason
    tokens = 64 if here.emulated else 4096
    q, k, v = _inputs(here, tokens, tokens)
    out, largest, total = (x.to(here.place) for x in _forward(q, k, v))

    def gradients() -> list[torch.Tensor]:
        made = operator("npu_fusion_attention_grad")(
            q, k, v, torch.ones_like(q), N, "BNSD", softmax_max=largest, softmax_sum=total, attention_in=out,
            scale_value=D**-0.5,
        )  # fmt: skip
        return [x.cpu() for x in made[:3]]

    def different() -> int:
        first = gradients()
        again = [gradients() for _ in range(RUNS)]
        return sum(not all(torch.equal(a, b) for a, b in zip(first, each, strict=True)) for each in again)

    found = {"runs": RUNS, "different by default": different()}
    torch.use_deterministic_algorithms(True)
    try:
        found["different if asked"] = different()
    finally:
        torch.use_deterministic_algorithms(False)
    return found


# ---------- merging operators


def updates(here: Here) -> dict[str, Any]:
    """The operators that merge partial results: which forms they take, and how exact they are."""
    if (reason := _left_out(here)) is not None:
        return reason
    return {"update": _attention_update(here), "ring": _ring_update(here)}


def _halves(here: Here) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Attention over each half of 64 keys: out [N, T, D], maximum and sum [N, T] in fp32; and over all, in float64."""
    q, k, v = (x.cpu()[0] for x in _inputs(here, 16, 64))
    parts = []
    for keys, values in zip(k.chunk(2, 1), v.chunk(2, 1), strict=True):
        scores = _scores(q, keys)
        largest = scores.amax(-1)
        weights = (scores - largest[..., None]).exp()
        total = weights.sum(-1)
        parts.append([x.float() for x in (weights @ values.double() / total[..., None], largest, total)])
    return parts, _scores(q, k).softmax(-1) @ v.double()


def _attention_update(here: Here) -> dict[str, Any]:
    if not has("npu_attention_update"):
        return {"absent": True}
    parts, whole = _halves(here)
    lse = [(largest + total.log()).reshape(-1).to(here.place) for _, largest, total in parts]
    outs = [out.reshape(-1, D).to(here.place) for out, *_ in parts]
    made = operator("npu_attention_update")(lse, outs, 1)
    return {"error": _error(made[0].cpu().reshape(whole.shape), whole)}


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def _ring_update(here: Here) -> dict[str, Any]:
    """Packed, with and without a leading 0 in the lengths; and with maxima below 0 in layout SBH."""
    if not has("npu_ring_attention_update"):
        return {"absent": True}
    parts, whole = _halves(here)
    forms: dict[str, bool | str] = {}
    for name, ends in (("a leading 0", [0, 6, 16]), ("no leading 0", [6, 16])):
        try:
            given = [x for part in parts for x in _packed_form(part, (6, 10))]
            lengths = torch.tensor(ends, dtype=torch.int64).to(here.place)
            made = operator("npu_ring_attention_update")(
                *(x.to(here.place) for x in given), actual_seq_qlen=lengths, input_layout="TND"
            )
            forms[name] = _error(made[0].cpu().transpose(0, 1), whole) <= TOLERANCE
        except RuntimeError as error:
            forms[name] = False
            forms[f"{name}: refused"] = " ".join(str(error).split())[:200]
    right = [name for name in ("a leading 0", "no leading 0") if forms[name]]
    return {"packed": " or ".join(right) or "neither form", "negative": _negative(here, parts, whole), "forms": forms}


def _packed_form(part: list[torch.Tensor], lengths: tuple[int, int]) -> list[torch.Tensor]:
    """out [T, N, D]; maximum and sum [T, N, 8] whose memory is sequence by sequence, heads first."""
    out, *statistics = part
    packed = [torch.cat([x.reshape(-1) for x in _parts(each, lengths, 1)]) for each in statistics]
    eight = [x.reshape(-1, 1).expand(-1, 8).reshape(out.shape[1], N, 8).contiguous() for x in packed]
    return [out.transpose(0, 1).contiguous(), *eight]


def _negative(here: Here, parts: list[list[torch.Tensor]], whole: torch.Tensor) -> str:
    """Layout SBH, one sequence: out [S, 1, N*D], statistics [1, N, S, 8]. All scores are lowered by 100."""
    given = []
    for out, largest, total in parts:
        flat = out.permute(1, 0, 2).reshape(out.shape[1], 1, -1).contiguous()
        given += [flat, *(x[None, ..., None].expand(-1, -1, -1, 8).contiguous() for x in (largest - 100, total))]
    try:
        made = operator("npu_ring_attention_update")(*(x.to(here.place) for x in given), input_layout="SBH")
    except RuntimeError as error:
        return f"refused: {' '.join(str(error).split())[:200]}"
    back = made[0].cpu().reshape(whole.shape[1], N, D).permute(1, 0, 2)
    return "right" if _error(back, whole) <= TOLERANCE else "wrong"


