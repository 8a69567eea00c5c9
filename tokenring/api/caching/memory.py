"""The memory of a cache at one rank: each layer's sealed and open keys and values, and what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from tokenring.api.caching.filling import Appended, CacheSight, Filled, Room, places
from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Layout, as_integer

if TYPE_CHECKING:
    from tokenring.api.context import ContextParallel
    from tokenring.runtime.cached_exchange import PartialExchange, Rows

Home = Literal["all", "tokens", "heads"]
NOTHING = "none"  # of the operations that ranks compare
Starts = Sequence[int] | torch.Tensor | None  # the first token of each row of a batch that is padded on its left


class CacheMemory:
    """Keys and values [B, Hkv, tokens, D] of each layer, heads first, as kernels read them.

    filled: by layer, what it holds. steps: how many were begun; current: the one that has not ended.
    opened: the open keys and values of all layers, [layers, B, Hkv, tokens, D].
    forms: by layer, the query heads and the scale on which the ranks have agreed. history: a digest of what was
    cropped, dropped and reordered since the cache was empty.
    """

    def __init__(
        self, cp: ContextParallel, layers: int, batch: int, kv_heads: int, widths: tuple[int, int], room: Room,
        dtype: torch.dtype, device: torch.device, windows: tuple[int | None, ...], starts: Starts,
    ) -> None:  # fmt: skip
        self.cp, self.layers, self.batch, self.kv_heads, self.room = cp, layers, batch, kv_heads, room
        self.head_dim, self.value_dim = widths
        self.dtype, self.device, self.windows = dtype, device, windows
        self.steps, self.history = 0, NOTHING
        self.forms: list[tuple[int, float] | None] = [None] * layers
        self.current: object | None = None
        self.keys, self.values = ([self._memory(room.sealed, width) for _ in range(layers)] for width in widths)
        self.device = self.keys[0].device  # with its number, as tensors say it
        self.opened = [self._memory(room.open, width, layers) for width in widths]
        self.open_keys, self.open_values = (list(each.unbind(0)) for each in self.opened)
        self._sealed: list[tuple[int, torch.Tensor, torch.Tensor] | None] = [None] * layers  # as it was given out last
        self._empty = Filled.empty(room.ranks)
        self.filled = [self._empty] * layers
        self.choices: dict[tuple[int, int, int], str] = {}  # of exchanges, by the size of rows: see `choosing`
        self._pad(starts)

    def _memory(self, tokens: int, width: int, *layers: int) -> torch.Tensor:
        """Allocate memory for so many tokens of keys or values, of one layer or several."""
        with torch.inference_mode(False):  # it may be used in another mode than it was made in
            shape = *layers, self.batch, self.kv_heads, tokens, width
            return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _pad(self, starts: Starts) -> None:
        found = None if starts is None else [as_integer(each) for each in _list(starts)]
        if found is not None and (len(found) != self.batch or any(each is None or each < 0 for each in found)):
            raise ConfigurationError(
                f"starts={_list(starts)!r}: give the first token of each of the {self.batch} rows, integers, 0 or more"
            )
        whole = found is None or not any(found)
        at = None if whole else torch.tensor(found, dtype=torch.int64, device=self.device)
        self._starts, self._latest = at, 0 if whole else max(each or 0 for each in found or ())
        self._sights = [CacheSight(window, self._starts, self._latest) for window in self.windows]

    @property
    def length(self) -> int:
        """Tokens that every layer holds, over all ranks."""
        return min(each.length for each in self.filled)

    @property
    def local_length(self) -> int:
        """Tokens that lie at this rank, sealed and open; of the first layer."""
        return self.filled[0].counts[self.cp.rank] + self.filled[0].open

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's keys and values: all that was allocated, whatever is filled."""
        parts = (*self.keys, *self.values, *self.open_keys, *self.open_values)
        return sum(each.nbytes for each in parts)

    @property
    def starts(self) -> torch.Tensor | None:
        """The first token of each row, int64 [B]; None: no row is padded."""
        return self._starts

    def positions(self, layer: int = 0) -> torch.Tensor:
        """Return the position of each token that lies at this rank, sealed and then open ones: int64 [n]."""
        filled = self._of_layer(layer)
        return places((*filled.sealed[self.cp.rank], *filled.open_runs), self.device)

    def held(self, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values that lie at this rank, [B, n, Hkv, D], in the order of `positions`."""
        filled, rank = self._of_layer(layer), self.cp.rank
        sealed, opened = filled.counts[rank], filled.open
        keys = torch.cat([self.keys[layer][:, :, :sealed], self.open_keys[layer][:, :, :opened]], dim=2)
        values = torch.cat([self.values[layer][:, :, :sealed], self.open_values[layer][:, :, :opened]], dim=2)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _of_layer(self, layer: int) -> Filled:
        self.check_open()
        at = as_integer(layer)
        if at is None or not 0 <= at < self.layers:
            raise ConfigurationError(f"layer={layer!r}: the cache has layers 0 to {self.layers - 1}")
        return self.filled[at]

    # ---------- what ranks compare

    def check_open(self) -> None:
        """Raise ConfigurationError once the cache is closed."""
        if not self.keys:
            raise ConfigurationError("this KVCache was closed; make another one, or close it after the last step")

    def note(self, what: str) -> None:
        """Add an operation to the history, which the ranks compare at the next step."""
        self.history = hashlib.sha256(f"{self.history} {what}".encode()).hexdigest()[:16]

    def differing(self) -> str:
        """Return what layers hold, where some hold other tokens than others or at other ranks."""
        distinct = set(self.filled)  # layers in one state share it
        if len(distinct) == 1 or len({each.trail for each in distinct}) == 1:
            return "alike"
        digest = hashlib.sha256(" ".join(each.trail for each in self.filled).encode()).hexdigest()[:16]
        return f"{sorted({each.length for each in distinct})} tokens, {digest}"

    # ---------- for cached_attention

    def sight(self, layer: int) -> CacheSight:
        """Return what hides keys of a layer from rows."""
        return self._sights[layer]

    def sealed(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's sealed keys and values of a layer: [B, Hkv, n, D]."""
        count, last = self.filled[layer].counts[self.cp.rank], self._sealed[layer]
        if last is None or last[0] != count:
            last = count, self.keys[layer].narrow(2, 0, count), self.values[layer].narrow(2, 0, count)
            self._sealed[layer] = last
        return last[1], last[2]

    def appended(self, layer: int, k: torch.Tensor, v: torch.Tensor, after: Appended, written: bool) -> None:
        """Append new keys and values [B, Hkv, T, D], which every rank has, as `after` says.

        written: they lie in the open part already.
        """
        if written and not after.deals:
            self.filled[layer] = after.filled
            return
        before = self.filled[layer].open
        for opened, sealed, new in ((self.open_keys, self.keys, k), (self.open_values, self.values, v)):
            memory = opened[layer]
            if not after.deals:
                memory[:, :, before : before + new.shape[2]] = new
                continue
            whole = memory[:, :, : before + new.shape[2]] if written else torch.cat([memory[:, :, :before], new], 2)
            for start, rank, into in after.deals:
                if rank == self.cp.rank:
                    sealed[layer][:, :, into : into + self.room.page] = whole[:, :, start : start + self.room.page]
            if left := after.filled.open:
                rest = whole[:, :, after.sealed_tokens :]
                memory[:, :, :left] = rest.clone() if written else rest
        self.filled[layer] = after.filled

    def sharded(self, layer: int, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> None:
        """Seal this rank's part of new keys and values [B, Hkv, T, D], in this layout."""
        after = self.filled[layer].after_sharded(layout, self.room)
        at = self.filled[layer].counts[self.cp.rank]
        self.keys[layer][:, :, at : at + k.shape[2]] = k
        self.values[layer][:, :, at : at + v.shape[2]] = v
        self.filled[layer] = after

    def exchange(self, name: str, rows: Rows) -> PartialExchange:
        """Return the exchange of this name for parts of so many rows, bound to memory; all ranks ask together."""
        from tokenring.runtime.cached_exchange import exchange_of

        transport = self.cp.transport_for(self.device)
        assert transport is not None  # there are several ranks
        return exchange_of(transport, self.cp.pool(self.device), name, rows, self.head_dim)


def _list(given: object) -> list[object]:
    try:
        return given.reshape(-1).tolist() if isinstance(given, torch.Tensor) else list(given)  # type: ignore[call-overload]
    except TypeError:
        raise ConfigurationError(f"starts={given!r}: give the first token of each row, integers, 0 or more") from None
