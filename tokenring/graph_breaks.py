"""Call functions between two graphs of torch.compile. To import this imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def outside(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function, which the compiler breaks its graph for."""
    return function(*given, **named)
