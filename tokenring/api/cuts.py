"""Layouts that are not a context's own: with "auto" one for each mask, and those that a call gives.

With "auto" a layout follows from the mask alone, so that ranks need not talk to find it; but a call must know by which
mask its tensors were cut. It takes that of its own mask only if `shard` or `positions` gave out this layout lately.
"""

from __future__ import annotations

from collections import OrderedDict

from tokenring.api.arguments import NEEDS_MASK
from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Layout, make_layout
from tokenring.sequence.mask_data import Mask
from tokenring.sequence.workload import Request

REMEMBERED = 256  # layouts that were given out: micro-batches under way, and some more


class Cuts:
    """The layouts of one context."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._given_out: OrderedDict[Layout, None] = OrderedDict()

    def of(self, length: int, mask: Mask | None) -> Layout:
        """Return the layout of a sequence of this length and mask. Raises ConfigurationError."""
        if mask is None:
            raise ConfigurationError(NEEDS_MASK)
        from tokenring.planner.layouts.balanced import balanced_layout

        return balanced_layout(mask, length, self._world_size)

    def taken(self, length: int, mask: Mask | None) -> Layout:
        """Return the layout by which a sequence is cut now: calls may take it after this. Raises ConfigurationError."""
        found = self.of(length, mask)
        self._given_out[found] = None
        self._given_out.move_to_end(found)
        if len(self._given_out) > REMEMBERED:
            self._given_out.popitem(last=False)
        return found

    def given(self, length: int, layout: Layout) -> Layout:
        """Return a layout that was given, if it is one of so many positions. Raises ConfigurationError."""
        if not isinstance(layout, Layout):
            raise ConfigurationError(f"layout is of type {type(layout).__name__}; give a Layout, or none: that of cp")
        return make_layout(layout, self._world_size, length)

    def of_call(self, request: Request) -> tuple[Layout, Layout]:
        """Return the layouts of q and of kv. Raises ConfigurationError where it is not known how they were cut."""
        size, mask = request.workload, request.mask
        if request.layout is not None:
            return self.given(size.q_length, request.layout), self.given(size.kv_length, request.layout)
        if size.q_length != size.kv_length:
            raise ConfigurationError(
                f'layout "auto" is for q and kv of one sequence, and q has {size.q_length} positions, kv '
                f"{size.kv_length}: name a layout, such as zigzag or contiguous"
            )
        found = self.of(size.q_length, mask)
        if self._world_size > 1 and found not in self._given_out:
            raise ConfigurationError(
                f'layout "auto": no tensor of {size.q_length} positions was cut by mask {shortened(str(mask))}, so '
                f"these may lie otherwise: cut them by tr.shard(x, cp, mask=mask), or give layout=..., that of the "
                f"mask by which they were cut (cp.layout_for(length, mask))"
            )
        return found, found


def shortened(text: str) -> str:
    """Return a text, or its beginning where it is long."""
    return text if len(text) <= 80 else f"{text[:77]}..."
