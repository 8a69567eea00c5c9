"""Objects bound to this process: shown by the names that users call, copied as themselves, never pickled.

Operators that can be given tensors, numbers and texts only know contexts by a name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar
from weakref import WeakValueDictionary

import torch

from tokenring.errors import ConfigurationError, NotPicklable

if TYPE_CHECKING:
    from typing_extensions import Self

# State of the process: a graph of torch.compile outlives every frame that could hand it one. It holds nobody alive.
_numbers = itertools.count(1)
_contexts: WeakValueDictionary[str, Any] = WeakValueDictionary()


Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Return the function such that torch.compile calls it between two graphs, and does not look into it."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            from tokenring.graph_breaks import outside

            return outside(function, *given, **named)
        return function(*given, **named)

    return call  # type: ignore[return-value]


class Shown(type):
    """A metaclass that shows in help() and dir() only the names that users call."""

    def __dir__(cls) -> Iterable[str]:
        hidden = {name for each in cls.__mro__ for name in vars(each).get("_internal", ())} | {"__annotations__"}
        return [name for name in super().__dir__() if name not in hidden]


class Standing(metaclass=Shown):
    """An object of this process alone. _internal: those of its names that only the package uses."""

    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in self._internal]

    def close(self) -> None:
        """Give back what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> Standing:
        return self

    def __deepcopy__(self, memo: object) -> Standing:
        """Return the object itself: copies of a model, as for averaged weights, share its ranks and buffers."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotPicklable(
            f"a {type(self).__name__} cannot be pickled or saved: it stands for the group, the connections and the "
            f"memory of this process. Save model.state_dict() instead of the model, or take the context out before, "
            f"and set one made anew after loading"
        )


def is_open(cp: Any) -> bool:
    """Tell whether a context was not closed, nor its group destroyed."""
    try:
        cp.check_open()
    except ConfigurationError:
        return False
    return True


def new_handle(cp: object) -> str:
    """Return a new name for a context, unique in this process: a text, which torch.compile never takes for a size."""
    handle = f"cp{next(_numbers)}"
    _contexts[handle] = cp
    return handle


def context_of(handle: str) -> Any:
    """Return the context of a handle. Raises ConfigurationError if the context was freed."""
    found = _contexts.get(handle)
    if found is None:
        raise ConfigurationError(
            f"a compiled graph calls attention over context {handle}, which is gone: keep the ContextParallel for as "
            f"long as what was compiled with it"
        )
    return found
