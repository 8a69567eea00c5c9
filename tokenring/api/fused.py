"""Products with a collective, without gradients: for graphs in which autograd was there before.

Both are layers whose weights stay: rows are gathered for a product, or a product's rows are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenring.api.tensor_parallel import DTYPES, TensorParallel
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.runtime.call import taken
from tokenring.sequence.workload import LinearRequest


def all_gather_matmul(
    x: torch.Tensor, weights: Sequence[torch.Tensor], tp: TensorParallel, keep: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the ranks' rows a [P·n, D], if they are to be kept, and their product with each weight, [P·n, N].

    x: [n, D], this rank's rows. weights: each [D, N], of any strides. Several go in one product, of a copy.
    Raises ConfigurationError (ranks that differ), UnsupportedError and PeerLost.
    """
    with tp.refusing("forward", x, *weights):
        _check("all_gather_matmul", x, *weights)
        ranks, widths = tp.world_size, [each.shape[1] for each in weights]
        sizes = (x.shape[0] * ranks, sum(widths) * ranks, x.shape[1])
        request = _staying(tp, tp.request("column-x" if keep else "column", sizes, x, "weights"))
        given = {"call": "all_gather_matmul", "x": list(x.shape), "weights": widths, "kept": keep}
        own = {"x": x.contiguous()[None, :, None, :], "c": tp.pairs(request, x)}
        own["w"] = (weights[0].t() if len(weights) == 1 else torch.cat([each.t() for each in weights]))[None, :, None]
        if keep:
            own["a"] = x.new_empty(sizes[0], x.shape[1])
    with tp.turn:
        tp.call(request, "forward", given, own)
    return own.get("a"), [each.contiguous() for each in torch.split(own["c"], widths, 1)]


def matmul_reduce_scatter(c: torch.Tensor, weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Return this rank's rows of the product c weight, summed over the ranks: [n, D] in c's dtype.

    c: [P·n, N]. weight: [N, D], of any strides.
    Raises ConfigurationError (rows that do not divide, ranks that differ), UnsupportedError and PeerLost.
    """
    with tp.refusing("forward", c, weight):
        _check("matmul_reduce_scatter", c, weight)
        ranks = tp.world_size
        if c.shape[0] % ranks:
            raise ConfigurationError(f"matmul_reduce_scatter was given {c.shape[0]} rows, not a multiple of {ranks}")
        request = _staying(tp, tp.request("row", (c.shape[0], c.shape[1] * ranks, weight.shape[1]), c, "weights"))
        given = {"call": "matmul_reduce_scatter", "c": list(c.shape), "weight": list(weight.shape)}
        own = {"c": c.contiguous(), "w": weight[None, :, None]}
    with tp.turn:
        executor, call = tp.call(request, "forward", given, own)
        return taken(executor.result(call, "q_partial", "y")[0, :, 0], c.dtype).contiguous()


def _staying(tp: TensorParallel, request: LinearRequest) -> LinearRequest:
    """Return a request whose ranks have all tokens with their own features. Raises ConfigurationError for others."""
    ranks = tp.world_size
    if (shape := tp.box(request).shape) != (request.tokens, request.features // ranks):
        raise ConfigurationError(
            f"schedule {request.schedule!r} leaves {shape[0]} rows and {shape[1]} features on a rank, and weights have "
            f"to stay here: {request.tokens} and {request.features // ranks}; take 'auto', 'direct-q' or 'tokenring'"
        )
    return request


def _check(name: str, x: torch.Tensor, *weights: torch.Tensor) -> None:
    """Raise ConfigurationError for shapes that do not fit, UnsupportedError for dtypes but fp32 and bf16."""
    if x.dim() != 2 or not weights or any(each.dim() != 2 or each.shape[0] != x.shape[1] for each in weights):
        raise ConfigurationError(f"{name} was given {[list(each.shape) for each in (x, *weights)]}: [n, D] and [D, N]")
    if x.dtype not in DTYPES or any(each.dtype != x.dtype for each in weights):
        raise UnsupportedError(f"{name} of {x.dtype} is not supported; use float32 or bfloat16, one of all")
