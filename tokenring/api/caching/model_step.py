"""A forward pass of a model over a cache: one agreement of all ranks for all of its layers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from tokenring.api.caching.agreeing import agree_together
from tokenring.api.caching.choosing import OF_HOME, check_moves, check_schedule
from tokenring.errors import ConfigurationError, PeerLost
from tokenring.runtime.agreement import Description, Disagreement, named_digest, refusing
from tokenring.sequence.layout import Layout, as_integer
from tokenring.sequence.mask import Causal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenring.api.caching.choosing import CachedSchedule
    from tokenring.api.caching.memory import CacheMemory, Home

SHOWN_IDS = 8  # of the last token of each row, in an error


class ModelStep:
    """One forward pass over a cache, from `KVCache.step`. Its `with` ends once every layer has its tokens.

    layer: the only one that it is of; None: all. reads: it appends nothing. tokens: that are new, over all ranks, and
    local_tokens those of this rank. before: tokens that were cached when it began.
    call: of a step that is one call alone: it checks that call, and returns what ranks compare of it.
    schedule: of its exchanges; see `choosing`.
    """

    def __init__(
        self, cache: CacheMemory, token_ids: torch.Tensor | int, home: Home, *, layer: int | None = None,
        reads: bool = False, call: Callable[[ModelStep], dict[str, object]] | None = None,
        schedule: CachedSchedule = "auto",
    ) -> None:  # fmt: skip
        self.cache, self._given, self.home, self.layer, self.reads = cache, token_ids, home, layer, reads
        self.schedule: str = schedule
        self._call, self._of_call = call, {}  # type: ignore[var-annotated]
        self.tokens = self.local_tokens = self.before = 0
        self.number = cache.steps + 1
        self.layout: Layout | None = None  # of the new tokens, where they are sharded
        self.short: object | None = None  # what its layers share

    def __enter__(self) -> ModelStep:
        """Agree with all ranks. Raises ConfigurationError, on all of them, and PeerLost."""
        cache = self.cache
        self.number = cache.steps + 1
        with cache.cp.turn:
            with refusing(cache.cp, "forward", cache.device):
                self._check()
                self._of_call = {} if self._call is None else self._call(self)
            self._call = None
            if cache.cp.world_size > 1:
                agree_together(cache.cp, cache.device, self._description())
        cache.current, cache.steps = self, self.number
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the step; where it fails on one rank, the others hear of it and wait no longer."""
        cache, cache.current = self.cache, None
        found = self._missing() if error is None else error
        if found is not None and not isinstance(found, (PeerLost, Disagreement)):
            transport = cache.cp.made_transport(cache.device)
            if transport is not None:
                transport.fail(found)
        if error is None and found is not None:
            raise found

    def _missing(self) -> ConfigurationError | None:
        """Return the error for a layer that was not called; None: all were."""
        filled, due = self.cache.filled, self.before + self.tokens
        short = [layer for layer in self._layers if filled[layer].length != due]
        if not short:
            return None
        return ConfigurationError(
            f"step {self.number} is of {self.tokens} tokens, and layer {short[0]} holds {filled[short[0]].length} "
            f"where {due} are due: call cached_attention once for each of the {self.cache.layers} layers"
        )

    @property
    def _layers(self) -> range:
        return range(self.cache.layers) if self.layer is None else range(self.layer, self.layer + 1)

    # ---------- what the ranks agree on

    def _check(self) -> None:
        cache = self.cache
        cache.cp.check_open()
        if cache.current is not None:
            raise ConfigurationError(f"step {cache.steps} has not ended: end its `with` before the next step")
        cache.check_open()
        if self.layer is not None and not 0 <= (-1 if (one := as_integer(self.layer)) is None else one) < cache.layers:
            raise ConfigurationError(f"layer={self.layer!r}: the cache has layers 0 to {cache.layers - 1}")
        lengths = [cache.filled[layer].length for layer in self._layers]
        self.before = min(lengths)
        if self.before != max(lengths):
            most = lengths.index(max(lengths))
            raise ConfigurationError(
                f"layer {lengths.index(self.before)} holds {self.before} tokens, and layer {most} {lengths[most]}: a "
                f"step goes on from one length in all layers; call crop({self.before}) on all ranks first"
            )
        given = _number_of(self._given, cache.batch)
        if self.home not in OF_HOME:
            raise ConfigurationError(
                f"q_home={self.home!r}: write 'all' if every rank has all new tokens, 'heads' if it has its part of "
                f"their query heads, or 'tokens' if it has its part of the tokens"
            )
        check_schedule(self.schedule, self.home)
        alone = self.layer is not None and self.home == "tokens" and not self.reads
        self.tokens = 0 if self.reads else given * cache.cp.world_size if alone else given
        self.local_tokens = self.tokens
        held, wanted = self.before, self.before + self.tokens
        if wanted > cache.room.capacity:
            raise ConfigurationError(
                f"the cache has room for {cache.room.capacity} tokens and holds {held}: {self.tokens} more are "
                f"{wanted - cache.room.capacity} too many; make it with a larger capacity"
            )
        if self.home == "tokens":
            if self.reads:
                raise ConfigurationError("reading only is for rows that every rank has: give q_home='all' or 'heads'")
            self._check_sharded()

    def _check_sharded(self) -> None:
        cache = self.cache
        if cache.starts is not None:
            raise ConfigurationError("rows with padding cannot be sharded by tokens: give q_home='all'")
        layout = self.layout = cache.cp.layout_for(self.tokens, Causal())
        if not layout.is_even:
            chunks = len(layout.chunks)
            raise ConfigurationError(
                f"{self.tokens} tokens do not divide into the {chunks} chunks of layout {layout.name!r}: give "
                f"{self.tokens // chunks * chunks} of them with q_home='tokens', and the rest with q_home='all'"
            )
        self.local_tokens = layout.local_length
        cache.filled[self._layers[0]].after_sharded(layout, cache.room)  # has every rank room for its part?
        check_moves(cache, self.schedule, self._layers)

    def _description(self) -> Description:
        cache = self.cache
        filled = cache.filled[self._layers[0]]
        return Description.of({
            "pass": f"step {self.number} of a cache",
            "new tokens": self.tokens,
            "layers of it": "all" if self.layer is None else self.layer,
            "q_home": self.home,
            "schedule": self.schedule,
            "tokens cached": filled.length,
            "token ids": _shown(self._given),
            "sealed": filled.counts,
            "batch": cache.batch,
            "layers": cache.layers,
            "kv heads and widths": (cache.kv_heads, cache.head_dim, cache.value_dim, *["latents"] * cache.latents),
            "dtype": cache.dtype,
            "capacity": cache.room.capacity,
            "page": cache.room.page,
            "windows": cache.windows,
            "starts": None if cache.starts is None else cache.starts.tolist(),
            "layout": None if self.layout is None else named_digest(self.layout),
            "all layers": cache.differing(),
            "crops, drops and reorders": cache.history,
            **self._of_call,
        })  # fmt: skip


def _number_of(given: torch.Tensor | int, batch: int) -> int:
    """Return how many tokens a step has. Raises ConfigurationError."""
    if isinstance(given, torch.Tensor):
        if given.dim() != 2 or given.shape[0] != batch or given.shape[1] < 1:
            raise ConfigurationError(
                f"token_ids are {list(given.shape)}: give the new tokens of all ranks, [{batch}, T], or their number T"
            )
        if given.is_floating_point() or given.is_complex():
            raise ConfigurationError(f"token_ids are in {given.dtype}: give integers")
        return int(given.shape[1])
    value = as_integer(given)
    if value is None or value < 1:
        raise ConfigurationError(f"a step of {given!r} tokens: give token ids [{batch}, T], or a number from 1 on")
    return value


def _shown(given: torch.Tensor | int) -> str:
    """Return token ids as ranks compare them: the last of each row, and a digest of all."""
    if not isinstance(given, torch.Tensor):
        return "not given"
    ids = given.detach().to("cpu", torch.int64).contiguous()
    hidden = ids.numel() > min(len(ids), SHOWN_IDS)
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16] if hidden else "alone"
    return f"ending in {ids[:SHOWN_IDS, -1].tolist()}, {digest}"
