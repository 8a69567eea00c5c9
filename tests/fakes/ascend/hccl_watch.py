"""Watches every operator on NPU tensors: none may touch a message's buffer between its post and its wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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
    for at, (name, writes) in enumerate(_operands(func)):
        check = ledger.check_write if writes else ledger.check_read
        for leaf in device.tensors_in(args[at] if at < len(args) else kwargs.get(name)):
            if isinstance(leaf, device.NpuTensor):
                check(device.raw(leaf), f"operator {func.name()}")


@cache
def _operands(func: Any) -> list[tuple[str, bool]]:
    """Names of the arguments, and whether each is written."""
    return [(each.name, bool(each.alias_info and each.alias_info.is_write)) for each in func._schema.arguments]
