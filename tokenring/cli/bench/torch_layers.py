"""Column and row layers of torch alone, as Megatron's with sequence parallelism: by collectives, or by fused operators.

What a layer is made of is `Products`; each layer's backward takes the other's. T tokens of all ranks, N features, D
width, P ranks. x [1, T/P, D], weight of a column layer [N/P, D], of a row layer [D, N/P], h [1, T, N/P].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tokenring.launch.groups import newer_collective

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # input and weight → output


class Products(NamedTuple):
    """Products with a collective.

    multiplied: rows [n, D], right [D, N], whether the rows of all ranks are wanted → these or None, and their product
    with right. scattered: c [P·n, N], right [N, D] → this rank's rows of the product, summed over the ranks.
    gathered: rows → those of all ranks, with which backward of a column layer begins; None: it keeps those of forward.
    """

    multiplied: Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor | None, torch.Tensor]]
    scattered: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gathered: Callable[[torch.Tensor], torch.Tensor] | None


def gathered(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return the ranks' tensors [n, ...] one after another."""
    whole = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    newer_collective("all_gather_single")(whole, x.contiguous(), group=group)
    return whole


def scattered(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return this rank's part of the sum of the ranks' tensors [P·n, ...]."""
    part = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    newer_collective("reduce_scatter_single")(part, x.contiguous(), group=group)
    return part


def by_collectives(group: Any = None) -> Products:
    """Return products that begin when all rows are there, and sums that begin when the product is."""

    def multiplied(rows: torch.Tensor, right: torch.Tensor, keep: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        whole = gathered(rows, group)
        return whole, whole @ right

    return Products(multiplied, lambda c, right: scattered(c @ right, group), lambda rows: gathered(rows, group))


def by_symmetric_memory(group: Any) -> Products:
    """Return torch's fused operators, symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter.

    Their layers keep gathered rows for backward, as graphs that torch fuses do.
    """
    import torch.distributed._symmetric_memory

    name, operators = group.group_name, torch.ops.symm_mem

    def multiplied(rows: torch.Tensor, right: torch.Tensor, keep: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        whole, (made,) = operators.fused_all_gather_matmul(rows, [right], 0, name, return_A=keep)
        return whole, made

    def summed(c: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = operators.fused_matmul_reduce_scatter(c.contiguous(), right, "sum", 0, name)
        return made

    return Products(multiplied, summed, None)


def layer_of(operator: str, products: Products) -> Layer:
    """Return the column or row layer that is made of these products; differentiable."""
    of = _Column if operator == "column" else _Row
    return lambda x, weight: of.apply(x, weight, products)  # type: ignore[no-untyped-call]


class _Column(torch.autograd.Function):
    """A column layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, products: Products) -> torch.Tensor:
        whole, made = products.multiplied(x[0], w.t(), products.gathered is None)
        ctx.save_for_backward(x[0] if products.gathered is not None else whole, w)
        ctx.products = products
        return made[None]

    @staticmethod
    def backward(ctx: Any, dc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, w = ctx.saved_tensors
        dx, again = ctx.products.scattered(dc[0], w)[None], ctx.products.gathered
        return dx, dc[0].t() @ (rows if again is None else again(rows)), None


class _Row(torch.autograd.Function):
    """A row layer."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, w: torch.Tensor, products: Products) -> torch.Tensor:
        ctx.save_for_backward(h, w)
        ctx.products = products
        made: torch.Tensor = products.scattered(h[0], w.t())
        return made[None]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        h, w = ctx.saved_tensors
        whole, dh = ctx.products.multiplied(dy[0].contiguous(), w, True)
        return dh[None], whole.t() @ h[0], None
