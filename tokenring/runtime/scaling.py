"""The scale of q·k: which ones there are, and those that no kernel takes.

Kernels are given positive scales only. Those that take the maximum of a row before they scale it (flash attention's
do), or hide a pair by -inf before, are wrong for others. So a negative one is folded into q, and one that is zero in
fp32 makes q zero: (-q)·k·|scale| and 0·k·1 are what q·k·scale is, exactly.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

from tokenring.errors import ConfigurationError

LEAST = torch.finfo(torch.float32).tiny  # below, kernels that scale in fp32 may take it for zero
WHOLE = 2**24  # from here on neighbours in fp32 are whole numbers apart

def checked_scale(given: object, head_dim: int) -> float:
    """Return the scale as a number; None is 1/√D. Raises ConfigurationError if it is not a finite number, or too large.

    q and k of ordinary size (1 in each of D dimensions) have q·k up to D. The largest scale is where such scores reach
    2²⁴: beyond, rounding them in fp32 changes probabilities by a factor of e, and gradients, which compute them again,
    grow without bound.
    """
    if given is None:
        return 1 / math.sqrt(head_dim)
    if not isinstance(given, Real) or isinstance(given, bool):
        shown = "a Tensor, which would get no gradient" if isinstance(given, torch.Tensor) else repr(given)
        raise ConfigurationError(f"scale is {shown}; give a finite number, or None for 1/√D")
    try:
        scale = float(given)
    except OverflowError:  # an integer or a fraction, of any number of digits
        raise ConfigurationError(
            f"scale is of type {type(given).__name__} and beyond what a float holds; {_most(head_dim)}"
        ) from None
    if not math.isfinite(scale):
        raise ConfigurationError(f"scale is {given!r}; give a finite number, or None for 1/√D")
    if abs(scale) > WHOLE / max(head_dim, 1):
        raise ConfigurationError(f"scale is {given!r}, and fp32 does not hold scores so large; {_most(head_dim)}")
    return scale


def _most(head_dim: int) -> str:
    return (
        f"give a number up to 2^24/D in size, which is {WHOLE / max(head_dim, 1):.9g} for head dim {head_dim}, "
        f"or None for 1/√D; what is larger belongs in q and k, whose values decide what can be computed"
    )


def folded(kernel: Any, scale: float) -> tuple[Any, float]:
    """Return a kernel that computes with this scale, and the positive scale to give it."""
    if scale >= LEAST:
        return kernel, scale
    sign = -1.0 if scale <= -LEAST else 0.0
    return _Folded(kernel, sign), -scale if sign else 1.0


class _Folded:
    """A kernel that is given q times a sign."""

    def __init__(self, kernel: Any, sign: float) -> None:
        self._kernel, self._sign = kernel, sign

    def forward(self, q: torch.Tensor, *others: Any, **options: Any) -> Any:
        return self._kernel.forward(q * self._sign, *others, **options)

    def forward_packed(self, q: torch.Tensor, *others: Any, **options: Any) -> Any:
        return self._kernel.forward_packed(q * self._sign, *others, **options)

    def backward(self, dout: torch.Tensor, q: torch.Tensor, *others: Any, **options: Any) -> Any:
        made = self._kernel.backward(dout, q * self._sign, *others, **options)
        made[0].mul_(self._sign)
        return made

    def backward_packed(self, dout: torch.Tensor, q: torch.Tensor, *others: Any, **options: Any) -> Any:
        made = self._kernel.backward_packed(dout, q * self._sign, *others, **options)
        for each in made:
            each[0].mul_(self._sign)
        return made
