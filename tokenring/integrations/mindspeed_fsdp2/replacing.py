"""Functions of others that ours stand in for, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

from tokenring.integrations.mindspeed_fsdp2.contexts import TrainerContexts


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


def while_used(own: Callable[..., Any], ours: Callable[..., Any], contexts: TrainerContexts) -> Callable[..., Any]:
    """Return a function that is ours while tokenring is used, and else theirs: trainers copy it to other places."""

    @wraps(own)
    def function(*given: Any, **more: Any) -> Any:
        return ours(*given, **more) if contexts.options is not None else own(*given, **more)

    return function


def _get(place: Any, name: str) -> Any:
    return vars(place).get(name) if isinstance(place, (ModuleType, type)) else place[name]


def _set(place: Any, name: str, function: Callable[..., Any]) -> None:
    if isinstance(place, (ModuleType, type)):
        setattr(place, name, function)
    else:  # an AttentionInterface
        place.register(name, function)
