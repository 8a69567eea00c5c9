"""Detection of changes that a caller makes to results that backward needs too."""

from __future__ import annotations

import torch


class Changes:
    """The version counts of results that a caller got, to detect changes in place. Holds none of their memory."""

    def __init__(self, *results: torch.Tensor) -> None:
        self._alike = [] if any(x.is_inference() for x in results) else [_alike(x) for x in results]
        self._versions = self._now()

    def found(self) -> bool:
        """Tell whether any of the results was changed in place since."""
        return self._now() != self._versions

    def _now(self) -> list[int]:
        return [x._version for x in self._alike]


def _alike(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that counts the changes of x, its views included, with no memory behind it."""
    other = x.detach()  # shares the count
    if type(x) is torch.Tensor:  # else it stands for one while a graph is traced, and holds no memory
        other.data = x.new_empty(0)  # the count stays
    return other
