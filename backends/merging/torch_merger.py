"""Merging partial attention results, in fp32 and in place.

out = Σ exp(lse_i - lse) out_i with lse = log Σ exp(lse_i): the log-sum-exp form of online softmax
(Milakov and Gimelshein 2018; ring-flash-attention). Rows that have seen nothing (lse -inf) are
neutral, and stay out 0, lse -inf when nothing comes. This is the merge that any device has; `merging.choice`
says where another one is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tokenring.backends.interfaces import Merger

LOWEST = torch.finfo(torch.float32).min  # stands for -inf where -inf minus -inf would be NaN

Fetch = Callable[[Any], torch.Tensor]  # of a call: one of its accumulators
AcceptOut = Callable[[Any, torch.Tensor, torch.Tensor], None]


def merge_(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Merge (new_out, new_lse) into (out, lse).

    out, new_out [..., D]; lse, new_lse [...] fp32; scratch [2, ...] fp32, overwritten.
    """
    total, weight = scratch[0], scratch[1]
    torch.logaddexp(lse, new_lse, out=total)
    torch.clamp(total, min=LOWEST, out=weight)
    torch.sub(new_lse, weight, out=weight).exp_()
    out.lerp_(new_out.to(out.dtype), weight[..., None])  # the two weights add up to 1
    lse.copy_(total)


def merge_seen_(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Merge as `merge_` does, where all rows of what comes have seen something: two operators less."""
    torch.logaddexp(lse, new_lse, out=lse)
    weight = torch.sub(new_lse, lse, out=scratch[1]).exp_()
    out.lerp_(new_out.to(out.dtype), weight[..., None])


@dataclass(frozen=True)
class TorchMerger:
    """A merger by `merge_`: torch's operators, on any device. Other mergers that work in place derive from it."""

    name = "torch"

    def supports(self, head_dim: int) -> str | None:
        """Return None: it merges rows of any head dim."""
        return None

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Merge into out and lse, in place; see Merger.merge_."""
        merge_(out, lse, new_out, new_lse, scratch)

    def merge_seen_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Merge into out and lse, in place, where every row of what comes has seen something."""
        merge_seen_(out, lse, new_out, new_lse, scratch)

    def merged(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        scratch: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge in place, and return out and lse; see Merger.merged."""
        self.merge_(out, lse, new_out, new_lse, scratch)
        return out, lse


def copying(out: Fetch, lse: Fetch | None = None) -> AcceptOut:
    """Return a function that copies a call's first partial result into its accumulators.

    out, lse: fetch the accumulators from a call; None: that of lse is not kept there.
    """

    def copy_out(call: Any, new_out: torch.Tensor, new_lse: torch.Tensor) -> None:
        out(call).copy_(new_out)

    if lse is None:
        return copy_out

    def copy(call: Any, new_out: torch.Tensor, new_lse: torch.Tensor) -> None:
        out(call).copy_(new_out)
        lse(call).copy_(new_lse)

    return copy


def accepting_by(merge: Callable[..., None], out: Fetch, lse: Fetch, scratch: torch.Tensor) -> AcceptOut:
    """Return a function that merges a partial result into a call's accumulators in place, by `merge`."""
    return lambda call, new_out, new_lse: merge(out(call), lse(call), new_out, new_lse, scratch)


def accepting(merger: Merger, out: Fetch, lse: Fetch, scratch: torch.Tensor, output: int | None) -> AcceptOut:
    """Return a function that merges a partial result into a call's accumulators, which `out` and `lse` fetch.

    output: the slot of call.outputs that they are the whole of, so that new tensors may take their place; else None.
    """
    if output is None:
        return accepting_by(merger.merge_, out, lse, scratch)
    merged, names = merger.merged, ("out", "lse")

    def replace(call: Any, new_out: torch.Tensor, new_lse: torch.Tensor) -> None:
        made = merged(out(call), lse(call), new_out, new_lse, scratch)
        call.outputs[output] = dict(zip(names, made, strict=True))

    return replace
