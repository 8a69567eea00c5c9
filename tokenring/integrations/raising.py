"""Errors of layers that run under torch.compile, too."""

from __future__ import annotations

from typing import NoReturn

import torch

from tokenring.api.context import ContextParallel
from tokenring.errors import TokenRingError
from tokenring.runtime.agreement import refusing


def raise_on_all_ranks(cp: ContextParallel, error: TokenRingError, *given: object) -> NoReturn:
    """Raise the error of a forward pass, of which all ranks hear; at once while a graph is traced.

    given: arguments of the call; the ranks speak on the device of the tensors among them.
    """
    if torch.compiler.is_compiling():
        raise error
    with refusing(cp, "forward", *given):
        raise error
