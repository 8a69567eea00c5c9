"""The windows of flash attention: a patch as causal, or as sides that count from the last row and column.

Since version 2.1 its masks are aligned at the bottom right: row i sees columns i + (cols - rows) - left to
i + (cols - rows) + right (Dao-AILab/flash-attention, README, "2.1: Change behavior of causal flag").
"""

from __future__ import annotations

from typing import NamedTuple

from tokenring.sequence.region import Patch


class Window(NamedTuple):
    """A window's left and right side: None is unbounded. causal: there is a shorter way to say (None, 0)."""

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """True if the window is (None, 0)."""
        return self.left is None and self.right == 0


def window(patch: Patch) -> Window | None:
    """Return the window of a trimmed patch; None where its steps are unequal."""
    if patch.row_step != 1 or patch.col_step != 1:
        return None
    offset = patch.cols - patch.rows
    left = None if patch.low is None else offset - patch.low
    right = None if patch.high is None else patch.high - offset
    return Window(left, right)


def second_version(patch: Patch) -> Window | None:
    """Return the window as version 2 (torch's and flash_attn's) means it; None: no window says this patch.

    It takes sides of at least `cols` for unbounded, and beside a bounded side an unbounded one for `cols`: tall tiles
    would lose pairs or gain some (flash_api.cpp, mha_fwd and set_params_fprop).
    """
    found = window(patch)
    if found is None or found.causal or patch.is_full:
        return found
    if found.right is None and patch.rows > patch.cols + 1:
        return None
    if found.right is not None and found.right >= patch.cols:
        return None
    return found
