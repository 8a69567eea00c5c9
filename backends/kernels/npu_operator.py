"""Operators of torch_npu, called by what their schema says that they take, and the statistics of rows in them.

No version number counts. The second version renames pre_tockens, the gradient says scale_value, and older ones lack
what newer ones have: the names are looked up once (Ascend/op-plugin, op_plugin_functions.yaml).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenring.errors import BackendUnavailable

SPELLINGS = {
    "scale": ("scale", "scale_value", "softmax_scale"),
    "before": ("pre_tockens", "pre_tokens"),
    "after": ("next_tockens", "next_tokens"),
}
EMPTY = -1e30  # an lse below is that of a row with every key masked
COPIES = 8  # of each statistic, all equal


class Operator:
    """One operator, under the names that we use: see SPELLINGS; others as the schema has them.

    Two of one function are equal.
    """

    def __init__(self, call: Callable[..., Any], schema: torch._C.FunctionSchema) -> None:
        self._call, self.name = call, schema.name
        taken = {each.name for each in schema.arguments}
        self._names = {
            ours: next((theirs for theirs in spellings if theirs in taken), ours)
            for ours, spellings in SPELLINGS.items()
        }
        self._taken = taken

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operator) and self._call is other._call

    def __hash__(self) -> int:
        return hash(self._call)

    def takes(self, name: str) -> bool:
        """Return True if it has an argument of this name."""
        return self._names.get(name, name) in self._taken

    def __call__(self, *operands: object, **options: object) -> Any:
        """Call the operator with these operands and options; options by our names."""
        return self._call(*operands, **{self._names.get(name, name): value for name, value in options.items()})


def find(*names: str) -> Operator:
    """Return the first of these operators that is there. Raises BackendUnavailable."""
    for name in names:
        packet = getattr(torch.ops.npu, name, None)
        if packet is not None:
            return Operator(packet.default, packet.default._schema)
    raise BackendUnavailable(
        f"kernel 'npu-fusion' needs the operator {' or '.join(names)}, and torch.ops.npu has neither: "
        f"import torch_npu, see `tokenring doctor`, or use ContextParallel(kernel='reference')"
    )


# ---------- statistics of rows: those that npu_fusion_attention returns, and those that its gradient takes


def row_lse(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return lse [...] from the eight copies [..., 8] of maximum and sum."""
    return largest[..., 0] + total[..., 0].log()


def canonical(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows with every key masked, in whichever way they came back, as out 0 and lse -inf."""
    empty = lse <= EMPTY
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf"))


def statistics(lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the statistics of the whole row for the gradient: a maximum of lse and a sum of 1.

    A row that sees nothing anywhere has lse -inf, or the lowest fp32 where the device saturates (on 910A, and with
    INF_NAN_MODE_ENABLE=0): any ordinary value gives its hidden pairs exp(lowest) = 0.
    """
    finite = lse.masked_fill(lse <= EMPTY, 0.0)
    largest = finite[..., None].expand(*lse.shape, COPIES).contiguous()
    return {"softmax_max": largest, "softmax_sum": torch.ones_like(largest)}
