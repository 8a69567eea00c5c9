"""Watches every operator: none may touch the buffer of a message between its post and its wait."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascend.device import NpuTensor, raw
from ascend.hccl_ledger import ledger


class Watch(TorchDispatchMode):
    """Inside it HcclError names the rank, the message and the operator at fault, at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if ledger.in_use and not func.is_view:
            _check(func, args, kwargs)
        return func(*args, **kwargs)


def _check(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """What the schema says is written must not be in use; what is read must have come."""
    given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(given.get(argument.name)):
            if isinstance(leaf, NpuTensor) and isinstance(leaf, torch.Tensor):
                (ledger.check_write if writes else ledger.check_read)(raw(leaf), f"operator {func.name()}")
