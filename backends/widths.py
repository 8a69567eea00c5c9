"""Values of another width than keys: how operators that want one width get them.

K and V are as wide as the caller gave them wherever they lie and on every wire. An operator that wants one width gets
zeros beside the narrower operands, in the call alone, and what it makes of them is cut off: zeros add nothing to q·k,
and columns of zeros of v make columns of zeros of out.
"""

from __future__ import annotations

import torch


def filled(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the tensor with zeros up to a width; as it is, where it has that."""
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def cut(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the first so many columns: the tensor itself, where it has no more."""
    return x[..., :width] if x.shape[-1] != width else x
