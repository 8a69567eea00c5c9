"""Bound methods that do not keep their object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a bound method that does not keep its object alive, for the object itself to hold.

    With a cycle, memory, connections and threads would stay until the garbage collector runs.
    """
    weak = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        found = weak()
        assert found is not None, "called by what its object does not hold"
        return found(*args, **kwargs)

    return call
