"""Functions of others that ours stand in for, and back."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """Hold where a function of others is, and ours for it: in a module or class, or in transformers' registry."""

    place: Any
    name: str
    own: Callable[..., Any]
    ours: Callable[..., Any]

    def put(self) -> None:
        """Put ours there."""
        _set(self.place, self.name, self.ours)

    def put_back(self) -> None:
        """Put theirs there, unless somebody has put another since."""
        if _get(self.place, self.name) is self.ours:
            _set(self.place, self.name, self.own)


def _get(place: Any, name: str) -> Any:
    return vars(place).get(name) if isinstance(place, (ModuleType, type)) else place[name]


def _set(place: Any, name: str, function: Callable[..., Any]) -> None:
    if isinstance(place, (ModuleType, type)):
        setattr(place, name, function)
    else:  # an AttentionInterface
        place.register(name, function)
