"""Every kind of call of kernel "mc2" on the device "meta", given to the operators that are registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend import fused_linears
from ascend.real import operator
from tokenring.backends.fused.mc2 import WholeLayer


class Gathers:
    """In place of the kernel with its group: what HCCL would gather."""

    ranks = 4

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows] * self.ranks)


# Operator and pass, what a call has, and what comes of it, for 8 tokens and 512 features of a rank, of width 256.
SHAPES = {"x": (8, 256), "w": (512, 256), "dy": (8, 256), "c": (32, 512), "dc": (32, 512), "a": (0,)}
LAYERS: list[tuple[str, str, str, dict[str, tuple[int, ...]]]] = [
    ("column", "forward", "x w", {"c": (32, 512)}), ("column-x", "forward", "x w a", {"c": (32, 512), "a": (32, 256)}),
    ("row", "forward", "c w", {"y": (8, 256)}), ("column", "backward", "dc x w", {"dx": (8, 256), "dw": (512, 256)}),
    ("column-dx", "backward", "dc w", {"dx": (8, 256)}), ("column-dw", "backward", "dc x", {"dw": (512, 256)}),
    ("row", "backward", "dy c w dc", {"dc": (32, 512), "dw": (512, 256)}),
    ("row-dc", "backward", "dy w dc", {"dc": (32, 512)}), ("row-dw", "backward", "dy c", {"dw": (512, 256)}),
]  # fmt: skip


def check_layers() -> None:
    """Raises AssertionError if an operator refuses a call, or gives other shapes than the kernel reads."""
    no_transport: Any = None
    kernel: Any = Gathers()
    for operator_name, direction, names, wanted in LAYERS:
        own = {each: torch.empty(SHAPES[each], dtype=torch.bfloat16, device="meta") for each in names.split()}
        own = {each: x[None, :, None] if each in ("x", "w", "dy") else x for each, x in own.items()}
        bound = WholeLayer(kernel, operator_name, direction, no_transport, "group")  # type: ignore[arg-type]
        bound._run(own)
        found = {each: tuple(own[each].shape) for each in wanted}
        assert found == wanted and {own[each].dtype for each in wanted} == {torch.bfloat16}, operator_name
    with pytest.raises(RuntimeError, match="Unknown keyword argument"):
        operator(fused_linears.SCATTER)(own["c"], own["c"], "group", 4, gather_output=True)
