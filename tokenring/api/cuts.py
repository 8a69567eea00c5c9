"""Layouts that are not a context's own: with "auto" one for each mask, and those that a call gives.

With "auto" a layout follows from the mask, and from the topology that the context was given, so that ranks need not
talk to find it; but a call must know by which mask its tensors were cut. It takes that of its own mask only if `shard`
or `positions` gave out this layout.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import TYPE_CHECKING

from tokenring.api.arguments import NEEDS_MASK, NO_LAYOUT
from tokenring.display.safe_text import plain
from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Layout, layout_numbered, make_layout
from tokenring.sequence.mask_data import Mask

if TYPE_CHECKING:
    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.topology.ranks import Topology

REMEMBERED = 1 << 16  # hashes of what was given out: of a set of evaluation, too
MOST_COMPILED = 1024  # layouts of compiled calls whose backward pass may be to come


class Cuts:
    """The layouts of one context that are not its own."""

    def __init__(
        self, world_size: int, topology: Topology | Interconnect | None = None, tensor_parallel: int = 1
    ) -> None:
        self._world_size, self._topology, self._tensor_parallel = world_size, topology, tensor_parallel
        self._compiled: dict[int, Layout] = {}
        self.chosen: dict[Hashable, str] = {}  # names of layouts by what calls were chosen for: see `choose_layout`
        self._given_out: dict[int, None] = {}  # hashes of layouts and of masks, the oldest first

    def of(self, length: int, mask: Mask | None) -> Layout:
        """Return the layout "auto" of a sequence of this length and mask. Raises ConfigurationError."""
        if mask is None:
            raise ConfigurationError(NEEDS_MASK)
        from tokenring.planner.layouts.balanced import balanced_layout

        return balanced_layout(mask, length, self._world_size, links=self.port_links)

    def even(self, length: int, mask: Mask) -> Layout:
        """Return the layout "auto" with its work evened further. Raises ConfigurationError."""
        from tokenring.planner.layouts.balanced import even_layout

        return even_layout(mask, length, self._world_size, self.port_links)

    @cached_property
    def port_links(self) -> int:
        """Return of how many links a rank's port is made; 1 where no topology is given: one is sought only to plan."""
        if self._topology is None:
            return 1
        from tokenring.planner.interconnects.shared_links import group_net

        return group_net(self._topology, self._world_size, self._tensor_parallel).port_links

    def give_out(self, length: int, mask: Mask | None) -> Layout:
        """Return the layout "auto" by which a sequence is cut now, which calls then take. Raises ConfigurationError."""
        found = self.of(length, mask)
        for each in (found, mask):
            self._given_out.pop(hash(each), None)
            self._given_out[hash(each)] = None
        while len(self._given_out) > REMEMBERED:
            self._given_out.pop(next(iter(self._given_out)))
        return found

    def checked(self, layout: object, length: int | None = None) -> Layout:
        """Return a layout that was given, if it is one for these ranks and so many positions; None: for any number."""
        if not isinstance(layout, Layout):
            raise ConfigurationError(NO_LAYOUT.format(type(layout).__name__))
        return make_layout(layout, self._world_size, layout.length if length is None else length)

    def numbered(self, number: int) -> Layout:
        """Return the layout that a compiled call names by its number, and keep it for the backward pass.

        Raises ConfigurationError where it is gone.
        """
        found = self._compiled.get(number) or layout_numbered(number)
        if found is None:
            raise ConfigurationError(
                f"a compiled call is cut by layout number {number} of this process, which is gone: keep a Layout for "
                f"as long as what was compiled with it"
            )
        self._compiled[number] = found
        if len(self._compiled) > MOST_COMPILED:
            self._compiled.pop(next(iter(self._compiled)))
        return found

    def for_call(self, lengths: tuple[int, int], mask: Mask) -> Layout:
        """Return the layout "auto" of a call. Raises ConfigurationError unless its tensors were cut by it."""
        q_length, kv_length = lengths
        if q_length != kv_length:
            raise ConfigurationError(
                f'layout "auto" is for q and kv of one sequence, and q has {q_length} positions, kv {kv_length}: '
                f"name a layout, such as zigzag or contiguous"
            )
        found = self.of(q_length, mask)
        self._check_given_out(found, f"tensor of {q_length} positions", mask)
        return found

    def check_mask(self, mask: Mask | None) -> None:
        """Raise ConfigurationError unless something was cut by this mask."""
        if mask is None:
            raise ConfigurationError(NEEDS_MASK)
        self._check_given_out(mask, "tensor", mask)

    def _check_given_out(self, what: Hashable, called: str, mask: Mask) -> None:
        if self._world_size > 1 and hash(what) not in self._given_out:
            raise ConfigurationError(
                f'layout "auto": no {called} was cut by mask {plain(str(mask), 80)}, so these may lie otherwise: cut '
                f"them by tr.shard(x, cp, mask=mask), or give layout=..., that of the mask by which they were cut "
                f"(cp.layout_for(length, mask))"
            )
