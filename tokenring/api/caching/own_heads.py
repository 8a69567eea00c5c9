"""The part of the query heads that is a rank's own, and the keys and values of the heads that it needs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadPart(NamedTuple):
    """A number of query heads from the first on, of all of them."""

    first: int
    number: int
    of: int

    def cut(self, q: torch.Tensor) -> torch.Tensor:
        """Return its heads of all query heads: q [B, Hq, T, D]."""
        return q.narrow(1, self.first, self.number)

    def kv(self, x: torch.Tensor) -> torch.Tensor:
        """Return the keys or values that its heads see, of x [B, Hkv, S, D]: as many heads as divide its own.

        A view where the part has whole groups of query heads, or lies in one of them; else a copy, a head for each.
        """
        group = self.of // x.shape[1]
        if self.first % group == 0 and self.number % group == 0:
            return x.narrow(1, self.first // group, self.number // group)
        if self.first // group == (self.first + self.number - 1) // group:
            return x.narrow(1, self.first // group, 1)
        heads = torch.arange(self.first, self.first + self.number, device=x.device) // group
        return x.index_select(1, heads)
