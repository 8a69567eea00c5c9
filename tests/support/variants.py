"""Calls with a gradient of lse, with sinks and with a soft cap: on ranks, and in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cases import NAMES, Case, Local
from oracle import Attention, allowed, relative_error, variant64
from ranks import Here, RankPools

from tokenring import ContextParallel, attention, shard

LIMITS = {"out": 1e-6, "lse": 1e-6, "dq": 5e-6, "dk": 5e-6, "dv": 5e-6, "dsinks": 5e-6}  # of fp32 against float64


@dataclass(frozen=True)
class Variant:
    """A case, and what it has besides.

    of_out, of_lse: the ranks on which the loss uses out, and lse; None: all. Both name a rank, or neither does.
    """

    case: Case
    sinks: bool = False
    softcap: float = 0.0
    of_out: tuple[int, ...] | None = None
    of_lse: tuple[int, ...] | None = None
    kernel: str = "auto"

    def __str__(self) -> str:
        return f"{self.case}, sinks {self.sinks}, cap {self.softcap}, out {self.of_out}, lse {self.of_lse}"

    def options(self) -> dict[str, Any]:
        """What `attention` is given."""
        return {"softcap": self.softcap} if self.softcap else {}

    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dlse [B, T, H], fp32, as large as dout; sinks [H], some small and some large.

        dlse has a mean, so that what it adds up to in the gradient of the sinks is no difference of large numbers.
        """
        case = self.case
        random = torch.Generator().manual_seed(case.q_length)
        dlse = 1 + torch.randn(case.batch, case.q_length, case.q_heads, generator=random)
        return dlse, 2 * torch.randn(case.q_heads, generator=random)


class Found(NamedTuple):
    """What one rank has."""

    results: Attention
    dsinks: torch.Tensor | None


def compute(here: Here, what: Variant, cp: ContextParallel | None = None) -> Found:
    """The call on one rank, forward and backward."""
    case = what.case
    cp = cp or here.cp(layout=case.layout, schedule=case.name, pieces=case.pieces, kernel=what.kernel)
    q, k, v, dout = (shard(x, cp).requires_grad_(index < 3) for index, x in enumerate(case.inputs()))
    every_dlse, sinks = what.given()
    dlse = shard(every_dlse, cp).transpose(1, 2)
    given = sinks.requires_grad_() if what.sinks else None
    out, lse = attention(q, k, v, cp, case.mask, sinks=given, return_lse=True, **what.options())
    if what.of_out is not None and here.rank not in what.of_out:
        wanted: dict[torch.Tensor, torch.Tensor] = {}
    else:
        wanted = {out: dout}
    if what.of_lse is None or here.rank in what.of_lse:
        wanted[lse] = dlse
    leaves = (q, k, v) if given is None else (q, k, v, given)
    dq, dk, dv, *dsinks = torch.autograd.grad(tuple(wanted), leaves, tuple(wanted.values()))
    return Found(Attention(out.detach(), lse.detach(), dq, dk, dv), dsinks[0] if dsinks else None)


def several(here: Here, variants: list[Variant]) -> list[Found]:
    return [compute(here, each) for each in variants]


def wanted_of(what: Variant) -> tuple[Attention, torch.Tensor | None]:
    """The whole result in float64."""
    case = what.case
    q, k, v, dout = (x.clone() for x in case.inputs())
    dlse, sinks = what.given()
    layout = case.layout_of(case.q_length)
    for rank in range(case.ranks):
        positions = list(layout.positions(rank))
        if what.of_out is not None and rank not in what.of_out:
            dout[:, positions] = 0
        if what.of_lse is not None and rank not in what.of_lse:
            dlse[:, positions] = 0
    visible = allowed(case.mask, case.q_length, case.kv_length)
    return variant64(
        q, k, v, dout, dlse.transpose(1, 2), visible, None, sinks if what.sinks else None, what.softcap
    )  # fmt: skip


def errors(what: Variant, parts: list[Found]) -> dict[str, float]:
    """The ranks' results put together, against float64; the gradient of the sinks is added up over the ranks."""
    made, (wanted, dsinks) = what.case.whole([Local(part.results, {}) for part in parts]), wanted_of(what)
    found = {name: relative_error(getattr(made, name), getattr(wanted, name)) for name in NAMES}
    for name, right in (("dv", wanted.dv), ("dq", wanted.dq), ("dk", wanted.dk)):
        if not bool(right.any()):  # as dv where nothing uses out
            found[name] = float(getattr(made, name).abs().max())
    if dsinks is not None:
        total = torch.stack([part.dsinks for part in parts if part.dsinks is not None]).double().sum(dim=0)
        found["dsinks"] = relative_error(total, dsinks)
    return found


def check(ranks: RankPools, variants: list[Variant]) -> None:
    """All of them, for one number of ranks, against float64."""
    (count,) = {each.case.ranks for each in variants}
    by_rank = ranks(count)(several, variants)
    for what, parts in zip(variants, zip(*by_rank, strict=True), strict=True):
        found = errors(what, list(parts))
        assert all(error <= LIMITS[name] for name, error in found.items()), (str(what), found)
