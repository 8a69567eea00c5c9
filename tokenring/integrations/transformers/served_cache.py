"""The cache that transformers hands around in `generate()`: its layers count tokens, a KVCache holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from tokenring.api.caching.kv_cache import KVCache
from tokenring.api.context import ContextParallel
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.sequence.layout import as_integer


class ServedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: `update` gives back the new keys and values, which the attention function appends itself."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: ServedCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer, self.is_initialized = cache, layer, True

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: memory is made when the batch is known."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is new, as it is."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return how many tokens the layer holds, over all ranks."""
        made = self.cache.made
        return 0 if made is None else made.filled[self.layer].length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of keys in a step, and where they begin."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return the tokens that there is room for."""
        return self.cache.capacity


class ServedCache(Cache):  # type: ignore[misc]
    """A KVCache as transformers knows caches; its memory is made at the first step, for the batch of that.

    made: the KVCache, None before. capacity: tokens of a sequence over all ranks.
    """

    def __init__(
        self, cp: ContextParallel, sizes: dict[str, Any], windows: Sequence[int | None], capacity: int, page: int
    ) -> None:
        super().__init__(layers=[ServedLayer(self, layer) for layer in range(len(windows))])
        self.cp, self.windows, self.capacity, self.page, self._sizes = cp, windows, capacity, page, sizes
        self.made: KVCache | None = None

    def of_batch(self, batch: int, starts: torch.Tensor | None) -> KVCache:
        """Return the KVCache for so many rows, with this padding. Raises ConfigurationError where it is for others."""
        if self.made is None:
            self.made = KVCache(
                self.cp, layers=len(self.windows), batch=batch, capacity=self.capacity, page=self.page,
                window=self.windows, starts=starts, **self._sizes,
            )  # fmt: skip
        made = self.made
        if made.length == 0 and batch == made.batch:
            made.reset(starts)
        same = torch.equal(*(torch.zeros(batch) if x is None else x.cpu().float() for x in (starts, made.starts)))
        if batch != made.batch or not same:
            raise ConfigurationError(
                f"the cache holds {made.batch} rows that begin at {_list(made.starts)}, and this step is of {batch} "
                f"that begin at {_list(starts)}: make a cache for each batch"
            )
        return made

    def reset(self) -> None:
        """Forget all tokens."""
        if self.made is not None:
            self.made.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens; their number is given below 0, as transformers does. 0 drops none.

        Raises ConfigurationError for a number above 0: transformers once meant tokens to keep by it.
        """
        count = as_integer(tokens_to_remove)
        if count is None or count > 0:
            raise ConfigurationError(f"crop({tokens_to_remove!r}): give how many tokens to remove as a number below 0")
        if self.made is not None:
            self.made.drop(-count)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each row go on with what another has cached; see KVCache.reorder."""
        if self.made is not None:
            self.made.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise UnsupportedError: the batch of a cache does not change."""
        raise UnsupportedError("a cache over ranks keeps its batch: repeat the prompt instead of what is cached")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Raise UnsupportedError: the batch of a cache does not change."""
        raise UnsupportedError("a cache over ranks keeps its batch: take the rows before the first step")


def _list(starts: torch.Tensor | None) -> object:
    return 0 if starts is None else starts.tolist()
