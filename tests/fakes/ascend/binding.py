"""Whether a call binds to a signature: what the dispatcher checks, for operators that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def bind(text: str, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. Raises TypeError: unknown or doubled names, what is missing, or of another type."""
    schema = torch._C.parse_schema(f"npu::{text}")
    places = [each.name for each in schema.arguments if not each.kwarg_only]
    if len(positional) > len(places):
        raise TypeError(f"{schema.name} takes {len(places)} arguments by position, got {len(positional)}")
    given = dict(zip(places, positional, strict=False))
    if doubled := given.keys() & named.keys():
        raise TypeError(f"{schema.name} got {sorted(doubled)} twice")
    given |= named
    known = {each.name: each for each in schema.arguments}
    if unknown := given.keys() - known.keys():
        raise TypeError(f"{schema.name}: unknown keyword argument {sorted(unknown)}")
    if missing := [name for name, each in known.items() if name not in given and not each.has_default_value()]:
        raise TypeError(f"{schema.name} is missing {missing}")
    for name, value in given.items():
        kind = str(known[name].type)
        if not KINDS[kind](value):
            raise TypeError(f"{schema.name}: {name} is {kind}, got {type(value).__name__}")
    return given


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(_is(kind), value))


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


KINDS: dict[str, Callable[[Any], bool]] = {
    "Tensor": _is(torch.Tensor),
    "Optional[Tensor]": _or_none(_is(torch.Tensor)),
    "List[Tensor]": _list_of(torch.Tensor),
    "int": _is(int),
    "float": _is(float, int),
    "bool": _is(bool),
    "str": _is(str),
    "List[int]": _list_of(int),
    "Optional[List[int]]": _or_none(_list_of(int)),
}
