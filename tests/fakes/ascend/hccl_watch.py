"""Watches every operator on NPU tensors: none may touch a message's buffer between its post and its wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ascend import device
from ascend.hccl_ledger import ledger


@contextmanager
def watch() -> Iterator[None]:
    """Inside, HcclError names the rank, the message and the operator at fault, at once."""
    run = device._run

    def watched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if ledger.in_use and not func.is_view:
            _check(func, args, kwargs)
        return run(func, args, kwargs)

    device._run = watched
    try:
        yield
    finally:
        device._run = run


def _check(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """What the schema says is written must not be in use; what is read must have come."""
    given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        check = ledger.check_write if writes else ledger.check_read
        for leaf in device.tensors_in(given.get(argument.name)):
            if isinstance(leaf, device.NpuTensor):
                check(device.raw(leaf), f"operator {func.name()}")
