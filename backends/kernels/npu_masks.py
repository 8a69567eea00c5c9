"""The masks of npu_fusion_attention: a patch as a sparse mode with the one 2048 × 2048 mask, or a mask of its own.

In its masks True is hidden. Without a mask it ignores the mode and computes full attention, so that every mode but
"full" comes with one (Ascend/cann ops-transformer, sparse_mode).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from tokenring.backends.kernels.masks import Masks
from tokenring.backends.kernels.reference import dense_mask
from tokenring.sequence.region import Patch

SIDE = 2048  # of the mask that the compressed modes take, whatever the lengths
EXPLICIT, TOP_LEFT, BOTTOM_RIGHT, BAND = 1, 2, 3, 4
FOREVER = 2147483647
Options = dict[str, object]


def compressed_mask(device: torch.device) -> torch.Tensor:
    """Make the upper triangle above the diagonal: 4 MiB."""
    return torch.ones(SIDE, SIDE, dtype=torch.bool, device=device).triu(1)


Triangle = Masks[torch.Tensor]
TRIANGLE: Triangle = Masks(lambda device: compressed_mask(device))  # one for all programs of a device that hold it


def wants_triangle(patch: Patch) -> bool:
    """Return True if a compressed mode computes this patch, alone or with others."""
    found = common_mode((patch,))
    return found is not None and found[0] != 0


def options(patch: Patch, device: torch.device, triangle: Triangle = TRIANGLE) -> Options:
    """Return the options that make the operator compute this patch."""
    compressed = packed_options((patch,), device, triangle)
    return {"atten_mask": _hidden(patch, device), "sparse_mode": EXPLICIT} if compressed is None else compressed


def packed_options(patches: tuple[Patch, ...], device: torch.device, triangle: Triangle = TRIANGLE) -> Options | None:
    """Return the options of one mode for all of these patches, or None."""
    found = _mode_in_calls(patches)
    if found is None:
        return None
    mode, before, after = found
    if mode == 0:
        return {}
    options: Options = {"atten_mask": triangle(device), "sparse_mode": mode}
    return options | ({"before": before, "after": after} if mode == BAND else {})


def common_mode(patches: tuple[Patch, ...]) -> tuple[int, int, int] | None:
    """Return (mode, before, after) that computes each of these patches as it is; mode 0 is no mask at all."""
    if all(patch.is_full for patch in patches):
        return 0, FOREVER, FOREVER
    if not all(map(every_row_sees, patches)):
        return None
    if all(patch.is_causal and patch.rows == patch.cols for patch in patches):
        return BOTTOM_RIGHT, FOREVER, FOREVER
    if all(patch.is_causal for patch in patches):
        return TOP_LEFT, FOREVER, FOREVER
    band = _common_band(patches)
    return None if band is None else (BAND, *band)


_mode_in_calls = lru_cache(maxsize=1024)(common_mode)  # of patches that calls are made with, again and again


def every_row_sees(patch: Patch) -> bool:
    """Return True if the steps are 1 and no row sees nothing: what compressed modes compute."""
    if patch.row_step != 1 or patch.col_step != 1:
        return False
    return bool(patch.columns_of(0)) and bool(patch.columns_of(patch.rows - 1))


def _common_band(patches: Sequence[Patch]) -> tuple[int, int] | None:
    """Return (before, after) from each patch's last row and column, from which the band mode counts."""
    before, after = [], []
    for patch in patches:
        offset = patch.cols - patch.rows
        before.append(Limit(patch.cols - 1, None if patch.low is None else offset - patch.low))
        after.append(Limit(patch.rows - 1, None if patch.high is None else patch.high - offset))
    return _both(_agreed(before), _agreed(after))


def _both(before: int | None, after: int | None) -> tuple[int, int] | None:
    return None if before is None or after is None else (before, after)


class Limit(NamedTuple):
    """One side of a band: exactly so far, or, where there is no bound, at least so far."""

    least: int
    exact: int | None


def _agreed(limits: list[Limit]) -> int | None:
    """Return the number that all bounded limits have, if it hides nothing of those without a bound."""
    exact = {each.exact for each in limits if each.exact is not None}
    least = max((each.least for each in limits if each.exact is None), default=None)
    if len(exact) > 1:
        return None
    if not exact:
        return least
    (value,) = exact
    return value if least is None or value >= least else None


def _hidden(patch: Patch, device: torch.device) -> torch.Tensor:
    """Return [rows, cols] booleans, True where hidden."""
    visible = dense_mask(patch, device)
    assert visible is not None  # full patches need no mask
    return ~visible
