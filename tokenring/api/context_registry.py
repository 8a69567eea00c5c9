"""Contexts by name, for operators that can be given tensors, numbers and texts only."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

from tokenring.errors import ConfigurationError

# State of the process: a graph of torch.compile outlives every frame that could hand it one. It holds nobody alive.
_numbers = itertools.count(1)
_contexts: WeakValueDictionary[str, Any] = WeakValueDictionary()


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
