"""Operators of torch_npu, called by what their schema says that they take, and by no version number.

The second version renames pre_tockens, the gradient says scale_value, and older ones lack what newer ones have:
the names are looked up once (Ascend/op-plugin, op_plugin_functions.yaml).
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
