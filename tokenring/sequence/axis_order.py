"""The order of a call's axes: [B, T, H, D], or [B, H, T, D] where the caller says so."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from tokenring.errors import ConfigurationError, TokenRingWarning

Order = Literal["bthd", "bhtd"]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Models have up to 128 heads, and a rank has some hundred tokens at least. So where the third axis of q and of k is as
# long as that, and longer than the second, the second is rather heads. That misses a rank's part of fewer than 128
# tokens, or of fewer than heads. It is a false alarm where 128 heads, of k too (no grouped ones), meet fewer tokens.
MANY = 128


class Once:
    """A warning that a process hears once, whatever its text; again if it was raised as an error."""

    def __init__(self) -> None:
        self.said = False

    def __call__(self, text: str, stacklevel: int) -> None:
        """Warn, unless this was called before and did not raise."""
        if not self.said:
            warnings.warn(text, TokenRingWarning, stacklevel=stacklevel + 1)
            self.said = True


SWAPPED = Once()


def in_order(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, order: Order | None) -> Inputs:
    """Return q, k and v as [B, T, H, D]: views, where they have another order. Raises ConfigurationError."""
    if order == "bhtd":
        return _swapped(q), _swapped(k), _swapped(v)
    if order is not None and order != "bthd":
        raise ConfigurationError(
            f"order={order!r}: write 'bthd' for q, k and v as [B, T, H, D], or 'bhtd' for [B, H, T, D]"
        )
    return q, k, v


def out_in_order(out: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Return out [B, T, H, D] in the order of the call, a view if that is another."""
    return out.transpose(1, 2) if order == "bhtd" else out


def warn_if_swapped(q: torch.Tensor, k: torch.Tensor, order: Order | None) -> None:
    """Warn, once in a process, where no order was said and the shapes look like another.

    Called by what users call, at its end: where warnings are errors, the ranks are in step, and calls that were refused
    have said so.
    """
    if order is not None or not q.dim() == k.dim() == 4:
        return
    if q.shape[2] >= MANY and k.shape[2] >= MANY and q.shape[1] < q.shape[2]:
        _tell("" if torch.compiler.is_compiling() else f" {list(q.shape)}")  # sizes of a graph may be variables


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """Return x with its axes 1 and 2 swapped; what is no such tensor as it is, for the checks of the call to say."""
    return x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.dim() == 4 else x


def _tell(shape: str) -> None:
    SWAPPED(
        f"q{shape} is read as [B, T, H, D], this rank's tokens before heads, and looks like [B, H, T, D], the order "
        f"of scaled_dot_product_attention: say order='bhtd' if it is that, or order='bthd' if it is not",
        stacklevel=4,
    )


# What torch.compiler.assume_constant_result sets, without its import of the compiler: it runs when a graph is traced.
_tell._dynamo_marked_constant = True  # type: ignore[attr-defined]
