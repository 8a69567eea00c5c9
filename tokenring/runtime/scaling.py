"""The scale of q·k: which ones there are, and those that no kernel takes.

Kernels are given positive scales only. Those that take the maximum of a row before they scale it (flash attention's
do), or hide a pair by -inf before, are wrong for others. So a negative one is folded into q, and one that is zero in
fp32 makes q zero: (-q)·k·|scale| and 0·k·1 are what q·k·scale is, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch

from tokenring.errors import ConfigurationError
from tokenring.schedule.ir import Pass

LEAST = torch.finfo(torch.float32).tiny  # below, kernels that scale in fp32 may take it for zero
WHOLE = 2**24  # from here on neighbours in fp32 are whole numbers apart

Compute = Callable[..., Any]  # a pass of a kernel, of one patch or of several


def checked_scale(given: object, head_dim: int) -> float:
    """The scale as a number; None is 1/√D. Raises ConfigurationError.

    q and k of ordinary size (1 in each of D dimensions) have q·k up to D. The largest scale is where such scores reach
    2²⁴: beyond, rounding them in fp32 changes probabilities by a factor of e, and gradients, which work them out anew,
    run out of all bounds.
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


def folded(compute: Compute, direction: Pass, scale: float) -> tuple[Compute, float]:
    """A kernel's pass as one for this scale, and the positive scale to give it."""
    if scale >= LEAST:
        return compute, scale
    sign = -1.0 if scale <= -LEAST else 0.0

    def forward(q: torch.Tensor, *others: Any, **options: Any) -> Any:
        return compute(q * sign, *others, **options)

    def backward(dout: torch.Tensor, q: torch.Tensor, *others: Any, **options: Any) -> Any:
        made = compute(dout, q * sign, *others, **options)
        for each in made if isinstance(made, list) else [made]:  # of several patches, or of one
            each[0].mul_(sign)
        return made

    return (forward if direction == "forward" else backward), -scale if sign else 1.0
