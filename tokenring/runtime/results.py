"""What a caller does with results that backward needs too."""

from __future__ import annotations

import torch


class Changes:
    """Whether results that a caller got were changed in place since. Holds none of their memory."""

    def __init__(self, *results: torch.Tensor) -> None:
        self._alike = [] if any(x.is_inference() for x in results) else [_alike(x) for x in results]
        self._versions = self._now()

    def found(self) -> bool:
        return self._now() != self._versions

    def _now(self) -> list[int]:
        return [x._version for x in self._alike]


def _alike(x: torch.Tensor) -> torch.Tensor:
    """A tensor that counts the changes of x, its views included, with no memory behind it."""
    other = x.detach()  # shares the count
    if type(x) is torch.Tensor:  # else it stands for one while a graph is traced, and holds no memory
        other.data = x.new_empty(0)  # the count stays
    return other
