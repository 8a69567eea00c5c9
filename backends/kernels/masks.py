"""Masks in device memory: made when a program is bound, and held by whoever runs it.

A mask belongs to no cache: what a captured graph reads must live as long as the graph does, whatever is computed
meanwhile. It must also be complete before another stream meets it: the device is waited for once, when masks are made,
and until then nobody else sees them. Programs that want the same mask share one. What nobody holds is made for the
call that wants it, on that call's own stream.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import Tiles
from tokenring.backends.kernels.flash_common import TileKernel
from tokenring.sequence.region import Patch

M = TypeVar("M")
K = TypeVar("K", bound="MaskedKernel")
What = tuple[Hashable, ...]  # what a mask is made of


class HeldMasks(Generic[M]):
    """One mask, for weak references."""

    def __init__(self, mask: M) -> None:
        self.mask = mask


class Masks(Generic[M]):
    """The masks that one program holds, of those that `make` makes; the first of its kind holds none."""

    def __init__(self, make: Callable[..., M]) -> None:
        self._make = make
        self._held: Mapping[What, HeldMasks[M]] = {}
        self._complete: WeakValueDictionary[What, HeldMasks[M]] = WeakValueDictionary()  # of all that hold some

    def __call__(self, *what: Any) -> M:
        """Return the mask that is held, else a new one."""
        found = self._held.get(what)
        return self._make(*what) if found is None else found.mask

    def holding(self, wanted: Iterable[What], device: torch.device) -> Masks[M]:
        """Return other Masks that hold these, complete for every stream of the device."""
        held = {what: self._complete.get(what) for what in dict.fromkeys(wanted)}
        with torch.inference_mode(False):  # they outlive the call, and later calls may want gradients
            made = {what: HeldMasks(self._make(*what)) for what, found in held.items() if found is None}
        if made:
            device_of(device).synchronize()
        self._complete.update(made)
        others = copy.copy(self)
        others._held = {what: found for what, found in (held | made).items() if found is not None}
        return others


class MaskedKernel(TileKernel):
    """A base of kernels for CUDA that say some patches by masks. masks: made of a patch, a dtype and a device."""

    most_held_bytes: int | None = None  # of one program's masks; None: they are small

    def __init__(self, masks: Masks[Any]) -> None:
        super().__init__()
        self._masks = masks

    @abstractmethod
    def mask_bytes(self, patch: Patch, dtype: torch.dtype) -> int:
        """Return the bytes that the mask of a patch takes which one call computes; 0: it needs none."""

    def mask(self, patch: Patch, like: torch.Tensor) -> Any:
        """Return the mask of a patch for operands like this one; None where none is needed."""
        return self._masks(patch, like.dtype, like.device) if self.mask_bytes(patch, like.dtype) else None

    def holding(self: K, tiles: Tiles) -> K:
        """Return this kernel with the masks of these tiles, as far as most_held_bytes goes."""
        parts = dict.fromkeys(part.patch for patch in tiles.patches for part in self._parts(patch))
        left, wanted = self.most_held_bytes, []
        for patch in parts:
            size = self.mask_bytes(patch, tiles.dtype) if self.says(patch) else 0
            if size and (left is None or size <= left):
                left = None if left is None else left - size
                wanted.append((patch, tiles.dtype, tiles.device))
        held = copy.copy(self)
        held._masks = self._masks.holding(wanted, tiles.device)
        return held
