"""The layouts by which a context's sequences are cut: one for all, or with "auto" one for each mask.

With "auto" a layout follows from the mask alone, so that ranks need not talk to find it; but a call must know by which
mask its tensors were cut. It takes that of its own mask only if `shard` or `positions` gave out this layout lately.
"""

from __future__ import annotations

from collections import OrderedDict

from tokenring.errors import ConfigurationError
from tokenring.runtime.agreement import named_digest
from tokenring.sequence.layout import Layout, make_layout
from tokenring.sequence.mask_data import Mask
from tokenring.sequence.workload import Request

AUTO = "auto"
REMEMBERED = 256  # layouts that were given out: micro-batches under way, and some more
NEEDS_MASK = (
    'layout "auto" cuts a sequence by its mask: give mask=..., the mask of the attention over it, or layout=..., '
    "as cp.layout_for(length, mask) returns it"
)


def of_parts(layout: str | Layout) -> str | Layout:
    """Return a layout with the same number of tokens on each rank: "auto" deals as many as "contiguous"."""
    return "contiguous" if layout == AUTO else layout


class Cuts:
    """The layouts of one context."""

    def __init__(self, layout: str | Layout, world_size: int) -> None:
        self._layout, self._world_size = layout, world_size
        self._given_out: OrderedDict[Layout, None] = OrderedDict()

    def of(self, length: int, mask: Mask | None = None) -> Layout:
        """Return the layout of a sequence of this length. Raises ConfigurationError."""
        if self._layout != AUTO:
            return make_layout(self._layout, self._world_size, length)
        if mask is None:
            raise ConfigurationError(NEEDS_MASK)
        from tokenring.planner.layouts.balanced import balanced_layout

        return balanced_layout(mask, length, self._world_size)

    def taken(self, length: int, mask: Mask | None, layout: Layout | None) -> Layout:
        """Return the layout by which a sequence is cut now: this one, if there is one. Raises ConfigurationError."""
        found = self.of(length, mask) if layout is None else make_layout(layout, self._world_size, length)
        self._given_out[found] = None
        self._given_out.move_to_end(found)
        if len(self._given_out) > REMEMBERED:
            self._given_out.popitem(last=False)
        return found

    def check_cut(self, mask: Mask | None, layout: Layout | None) -> tuple[int, ...] | None:
        """Return the parts of a layout that is given; None: those of the context's. Raises ConfigurationError."""
        if layout is not None:
            return make_layout(layout, self._world_size, layout.length).local_lengths
        if self._layout == AUTO and mask is None:
            raise ConfigurationError(NEEDS_MASK)
        return None

    def of_call(self, request: Request) -> tuple[Layout, Layout]:
        """Return the layouts of q and of kv. Raises ConfigurationError where it is not known how they were cut."""
        size, mask, given = request.workload, request.mask, request.layout
        if given is not None:
            q_layout, kv_layout = (make_layout(given, self._world_size, n) for n in (size.q_length, size.kv_length))
            return q_layout, kv_layout
        if self._layout == AUTO and size.q_length != size.kv_length:
            raise ConfigurationError(
                f'layout "auto" is for q and kv of one sequence, and q has {size.q_length} positions, kv '
                f"{size.kv_length}: name a layout, such as zigzag or contiguous"
            )
        found = self.of(size.q_length, mask)
        if self._layout == AUTO and self._world_size > 1 and found not in self._given_out:
            raise ConfigurationError(
                f'layout "auto": no tensor of {size.q_length} positions was cut by mask {shortened(str(mask))}, so '
                f"these may lie otherwise: cut them by tr.shard(x, cp, mask=mask), or give layout=..., that of the "
                f"mask by which they were cut (cp.layout_for(length, mask))"
            )
        return found, found if size.kv_length == size.q_length else self.of(size.kv_length, mask)

    def text(self, request: Request) -> str:
        """Return the layout of a call as ranks compare it. Raises ConfigurationError, as `of_call` does."""
        if request.layout is None and isinstance(self._layout, str) and self._layout != AUTO:
            return self._layout
        return named_digest(self.of_call(request)[0])


def shortened(text: str) -> str:
    """Return a text, or its beginning where it is long."""
    return text if len(text) <= 80 else f"{text[:77]}..."
