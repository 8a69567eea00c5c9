"""Relative errors of gradients by their norms, for tests that look for the largest."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def finite(error: torch.Tensor) -> float:
    """An error of which max() finds the largest: inf where it is no number."""
    return float("inf") if error.isnan() else float(error)


def largest_error(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], zeros_may_lack: bool = False
) -> tuple[float, str]:
    """The largest relative error, and of what: those that are almost 0 count by a thousandth of the largest.

    What is not found is wrong by 1; zeros_may_lack: unless it is to be 0.
    """
    whole = max(x.norm() for x in wanted.values())
    errors = {
        name: finite((found[name].double() - x).norm() / max(x.norm(), 1e-3 * whole)) if name in found else 1.0
        for name, x in wanted.items()
        if name in found or not zeros_may_lack or bool(x.any())
    }
    name = max(errors, key=errors.__getitem__)
    return errors[name], name
