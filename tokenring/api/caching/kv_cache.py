"""KVCache: keys and values of a model's layers, dealt over the ranks of a context and left where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from tokenring.api.arguments import refuse_wire
from tokenring.api.caching.filling import Filled, Room, places
from tokenring.api.caching.memory import NOTHING, CacheMemory, Home, Starts
from tokenring.api.inputs import check_context
from tokenring.api.standing import Standing
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.sequence.layout import as_integer
from tokenring.sequence.workload import DTYPES

if TYPE_CHECKING:
    from tokenring.api.caching.choosing import CachedSchedule
    from tokenring.api.caching.model_step import ModelStep
    from tokenring.api.context import ContextParallel


class KVCache(CacheMemory, Standing):
    """The keys and values of all layers of a model, for `cached_attention`. Make one on every rank, of the same sizes.

        cache = tr.KVCache(cp, layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, capacity=131072)
        with cache.step(token_ids):                                 # once for a forward pass of the model
            out = tr.cached_attention(q, k, v, cache, layer=3)      # in each layer

    Most tokens are sealed: each lies at one rank, and stays there. The newest, fewer than cp.world_size · page, are
    open: they lie at every rank. When the open part is full, one page of it becomes sealed at each rank.

    capacity: tokens of a sequence over all ranks. A rank has memory for capacity / cp.world_size sealed tokens and
    cp.world_size · page open ones: `nbytes`. head_dim, value_dim: of k and of v (None: head_dim).
    latent_dim: of multi-latent attention, whose values are the first latent_dim elements of keys and are kept there:
    512 of a head_dim of 512 + 64, with kv_heads=1. Calls then give v=None (`cached_latent_attention`).
    window: how many tokens a token sees, itself included, one number or one for each layer; None: all before it.
    starts: the first token of each row of a batch that is padded on its left; None: none is.

    Raises ConfigurationError or UnsupportedError for sizes that cannot be.
    """

    _internal: ClassVar[frozenset[str]] = frozenset((
        "appended", "as_values", "check_open", "choices", "current", "differing", "exchange", "filled", "forms",
        "history", "keys", "latents", "movers", "note", "open_keys", "open_values", "opened", "owned", "room", "sealed",
        "sharded", "sight", "steps", "values",
    ))  # fmt: skip

    def __init__(
        self,
        cp: ContextParallel,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        batch: int = 1,
        value_dim: int | None = None,
        latent_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        page: int = 64,
        device: torch.device | str | None = None,
        window: int | Sequence[int | None] | None = None,
        starts: Starts = None,
    ) -> None:
        check_context(cp)
        refuse_wire(cp.wire, "attention over a KVCache")
        width, of_values = _size("head_dim", head_dim), value_dim if latent_dim is None else latent_dim
        widths = width, width if of_values is None else _size("value_dim", of_values)
        if latent_dim is not None and (value_dim is not None or kv_heads != 1 or widths[1] > width):
            raise ConfigurationError(
                f"KVCache: latent_dim={latent_dim!r} with kv_heads={kv_heads!r}, head_dim={head_dim!r} and "
                f"value_dim={value_dim!r}: values are the first latent_dim of head_dim elements of keys that all heads "
                f"share; give kv_heads=1, a head_dim from latent_dim on, and no value_dim"
            )
        total, count, world = _size("capacity", capacity), _size("layers", layers), cp.world_size
        if dtype not in DTYPES:
            raise UnsupportedError(f"a cache of {dtype} is not supported: use float32, bfloat16 or float16")
        room = Room(world, _size("page", page), total, total // world)
        try:
            where = torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError):
            raise ConfigurationError(f"KVCache: device={device!r}; give one that torch knows, as 'cuda'") from None
        sizes = count, _size("batch", batch), _size("kv_heads", kv_heads), widths
        super().__init__(cp, *sizes, room, dtype, where, _windows(window, count), starts, latent_dim is not None)

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that it has room for, over all ranks."""
        return self.room.capacity

    @property
    def page(self) -> int:
        """Tokens that become sealed together at a rank."""
        return self.room.page

    def __repr__(self) -> str:
        state = "" if self.keys else ", closed"
        return (
            f"KVCache({self.length} of {self.capacity} tokens, {self.local_length} of them at rank {self.cp.rank} of "
            f"{self.cp.world_size}, {self.layers} layers, {self.nbytes} bytes{state})"
        )

    # ---------- what it is told

    def step(self, token_ids: torch.Tensor | int, q_home: Home = "all", schedule: CachedSchedule = "auto") -> ModelStep:
        """Begin a forward pass of the model, to be used in a `with`: all ranks agree on it, once for all layers.

        token_ids: the new tokens, [B, T], whole on every rank; ranks whose tokens differ are refused before anything
        is cached. Or only their number T. q_home: "all" if every rank computes all of them; "tokens" if each computes
        its part in cp's layout; "heads" if each computes all of them for its part of the query heads.
        schedule: with q_home "all" how partial results reach their ranks, in a "one-shot" or "two-step" exchange; with
        "tokens" what moves, q and results ("direct-q") or what is cached ("direct-kv", "ring"); with "heads"
        "direct-q". "auto": the faster one on this interconnect, as rank 0 works it out once for each size; never
        "direct-kv", which holds all that is cached of a layer.
        Raises ConfigurationError, on all ranks, also where the cache has no room.
        """
        from tokenring.api.caching.model_step import ModelStep

        return ModelStep(self, token_ids, q_home, schedule=schedule)

    def crop(self, keep: int) -> None:
        """Keep the first `keep` tokens, from 0 on. All ranks call it alike; no rank sends anything."""
        self._outside_a_step("crop")
        wanted = as_integer(keep)
        if wanted is None or wanted < 0:
            raise ConfigurationError(
                f"crop({keep!r}): give how many tokens to keep, from 0 on; drop(n) drops the newest n"
            )
        self._keep(wanted)

    def drop(self, count: int) -> None:
        """Drop the newest `count` tokens, from 0 on; more than there are: all. Else as `crop`."""
        self._outside_a_step("drop")
        wanted = as_integer(count)
        if wanted is None or wanted < 0:
            raise ConfigurationError(f"drop({count!r}): give how many of the newest tokens to drop, from 0 on")
        self._keep(max(0, self.length - wanted))

    def _keep(self, keep: int) -> None:
        if all(filled.length <= keep for filled in self.filled):
            return
        self.note(f"keep {keep}")
        done: dict[Filled, Filled] = {}
        for layer, filled in enumerate(self.filled):
            if filled.length <= keep:
                continue
            runs = filled.sealed[self.cp.rank]
            kept = (places(runs, self.device) < keep).nonzero()[:, 0]
            if len(kept) and int(kept[-1]) != len(kept) - 1:  # what is dropped lies among what is kept
                for each, _ in self.owned:
                    each[layer][:, :, : len(kept)] = each[layer].index_select(2, kept)
            if filled not in done:
                done[filled] = filled.cropped(keep)
            self.filled[layer] = done[filled]

    def reorder(self, rows: torch.Tensor) -> None:
        """Let row i of the batch go on with what row rows[i] has cached, as beam search does. rows: int64 [B]."""
        self._outside_a_step("reorder")
        if not isinstance(rows, torch.Tensor):
            raise ConfigurationError(f"reorder expects a tensor of row numbers, int64; got a {type(rows).__name__}")
        if rows.shape != (self.batch,) or rows.dtype not in (torch.int64, torch.int32):
            raise ConfigurationError(
                f"reorder expects {self.batch} row numbers, int64; got {list(rows.shape)} in {rows.dtype}"
            )
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.batch:
            raise ConfigurationError(f"reorder expects row numbers from 0 to {self.batch - 1}; got {rows.tolist()}")
        if rows.tolist() == list(range(self.batch)):
            return
        self.note(f"rows {rows.tolist()}")
        rows = rows.to(self.device)
        for layer, filled in enumerate(self.filled):
            sealed, opened = filled.counts[self.cp.rank], filled.open
            for both in self.owned:
                for each, count in zip(both, (sealed, opened), strict=True):
                    part = each[layer][:, :, :count]
                    part.copy_(part.index_select(0, rows))
        if self._starts is not None:
            self._pad(self._starts.index_select(0, rows))

    def reset(self, starts: Starts = None) -> None:
        """Forget all tokens, for another sequence in the same memory. starts: its padding, as above."""
        self._outside_a_step("reset")
        self._pad(starts)
        self.filled, self.history = [self._empty] * self.layers, NOTHING

    def close(self) -> None:
        """Give back the memory; closing twice is fine, and every other use is refused."""
        for cp in self.movers.values():
            cp.close()
        self.movers = {}
        self.keys, self.values, self.open_keys, self.open_values = [], [], [], []
        self.opened, self._sealed = [], []
        self.filled = [self._empty] * self.layers

    def _outside_a_step(self, what: str) -> None:
        self.check_open()
        if self.current is not None:
            raise ConfigurationError(f"{what} inside of a step: end the `with cache.step(...)` before")


def _size(name: str, given: object) -> int:
    value = as_integer(given)
    if value is None or value < 1:
        raise ConfigurationError(f"KVCache: {name}={given!r}; give a positive integer")
    return value


def _windows(window: int | Sequence[int | None] | None, layers: int) -> tuple[int | None, ...]:
    several = hasattr(window, "__iter__") and not isinstance(window, str)
    given: tuple[object, ...] = tuple(window) if several else (window,) * layers  # type: ignore[arg-type]
    found = tuple(map(as_integer, given))
    wrong = [size for size, each in zip(found, given, strict=True) if each is not None and (size or 0) < 1]
    if len(found) != layers or wrong:
        raise ConfigurationError(
            f"KVCache: window={window!r}; give a number from 1 on, or one (or None) for each of {layers} layers"
        )
    return found
