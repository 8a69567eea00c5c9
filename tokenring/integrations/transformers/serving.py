"""`generate()` of transformers over a KV cache that is dealt over ranks.

The decoder stack is wrapped: a long prompt is cut over the ranks, and what comes back is whole on every rank. Single
tokens are computed by every rank. Attention of all layers is `cached_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tokenring.api.caching.agreeing import agree_together
from tokenring.api.caching.cached_attention import cached_attention
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context
from tokenring.api.sharding import positions, unshard
from tokenring.errors import BackendUnavailable, ConfigurationError, UnsupportedError
from tokenring.integrations.transformers.refusals import CACHES
from tokenring.runtime.agreement import Description, refusing
from tokenring.sequence.layout import Layout, as_integer
from tokenring.sequence.mask import Causal

if TYPE_CHECKING:
    from tokenring.api.caching.kv_cache import KVCache
    from tokenring.api.caching.memory import Home
    from tokenring.integrations.transformers.served_cache import ServedCache

NAME = "tokenring-serving"  # of the attention function, as transformers' config has it
OF_MODULE = "_tokenring_serving"  # of each attention module
SHARDED_FROM = 64  # tokens of a prompt: below, every rank computes all of them
SEED_BYTES = 6
ABSENT = object()  # an attribute that an object has from its class alone
Piece = tuple[int, int, "Home"]  # first token, end, and who computes them


def serve_with_tokenring(
    model: Any, cp: ContextParallel, *, page: int = 64, chunk: int | None = None,
    shard_from: int | None = SHARDED_FROM,
) -> Serving:  # fmt: skip
    """Let `model.generate()` keep its KV cache over the ranks of cp. Every rank holds the model, and makes each call.

    model: a decoder with a head for the next token, of transformers (Llama, Qwen, Mistral and others of their build),
    in evaluation mode. All ranks give the same prompts, and get the same tokens. page: tokens that become sealed
    together. chunk: the longest piece in which a prompt is computed; None: at once. shard_from: from how many tokens on
    a piece is cut over the ranks; None: never. Rows of a batch that is padded on its left are not cut, nor what is left
    over where tokens do not divide into the chunks of cp's layout; a Layout of cp's own cuts pieces of its length.

    Returns a handle: its `close`, or the end of a `with`, leaves the model as it was.
    Raises BackendUnavailable without transformers, and ConfigurationError, also for a model that is served already, or
    a chunk so short that no piece would be cut; in a step UnsupportedError for masks that a cache over ranks does not
    know (only padding on the left is), and what KVCache.step raises. What one rank refuses in a call, all ranks hear.
    """
    check_context(cp)
    for name, value in (("page", page), ("chunk", chunk), ("shard_from", shard_from)):
        if (value is not None or name == "page") and (as_integer(value) or 0) < 1:
            raise ConfigurationError(f"serve_with_tokenring: {name}={value!r}; give a positive integer")
    least = None if shard_from is None else max(shard_from, _unit(cp))
    if chunk is not None and least is not None and chunk < least:
        raise ConfigurationError(
            f"serve_with_tokenring: chunk={chunk} with shard_from={shard_from} and layout {_name(cp)!r} cuts nothing "
            f"over the ranks: give a chunk from {least} on, or shard_from=None to compute all tokens on every rank"
        )
    return Serving(model, cp, page, chunk, shard_from)


class Serving:
    """A model whose cache lies over ranks, until it is closed.

    cache: of the last step. pieces: of the last call: (first token, end, "tokens" where each rank computed its part, or
    "all" where every rank computed all of them).
    """

    def __init__(self, model: Any, cp: ContextParallel, page: int, chunk: int | None, shard_from: int | None) -> None:
        try:
            from transformers import AttentionInterface
        except ImportError as error:
            raise BackendUnavailable("transformers is not installed here: pip install transformers") from error
        self.model, self.cp, self.cache = model, cp, None  # type: Any, ContextParallel, KVCache | None
        self._page, self._chunk, self._shard_from = page, chunk, shard_from
        self.pieces: list[Piece] = []
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        if self._decoder is None or self._decoder is model or not hasattr(model, "_prepare_cache_for_generation"):
            raise UnsupportedError(f"a {type(model).__name__} has no decoder that generates: give a causal model")
        if any(hasattr(module, OF_MODULE) for module in self._attentions()):
            raise ConfigurationError(f"this {type(model).__name__} is served already: close that handle first")
        self._named = name_of_cache()
        self._config = model.config.get_text_config(decoder=True)
        self._windows = windows_of(self._config)
        AttentionInterface.register(NAME, _attention)
        self._before = self._config._attn_implementation
        model.set_attn_implementation(NAME)
        self._inner: Callable[..., Any] = self._decoder.forward
        self._prepare: Callable[..., Any] = model._prepare_cache_for_generation
        changed = (self._decoder, "forward", self._forward), (model, "_prepare_cache_for_generation", self._prepared)
        self._own = [(owner, name, vars(owner).get(name, ABSENT)) for owner, name, _ in changed]
        for owner, name, ours in changed:
            setattr(owner, name, ours)
        for module in self._attentions():
            setattr(module, OF_MODULE, self)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the model as it was; closing twice is fine."""
        if self._before is None:
            return
        for owner, name, before in self._own:
            vars(owner).pop(name, None)
            if before is not ABSENT:  # such as a forward that another library has put there
                setattr(owner, name, before)
        for module in self._attentions():
            module.__dict__.pop(OF_MODULE, None)
        self.model.set_attn_implementation(self._before)
        self._before = self.cache = None

    def new_cache(self, capacity: int) -> ServedCache:
        """Return an empty cache for `generate(cache=...)`, before transformers 5.24 `past_key_values=...`.

        capacity: tokens of a sequence, over all ranks.
        """
        from tokenring.integrations.transformers.served_cache import ServedCache

        config = self._config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = {
            "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "head_dim": width, "dtype": self.model.dtype, "device": self.model.device,
        }  # fmt: skip
        return ServedCache(self.cp, sizes, self._windows, capacity, self._page, lambda: self._before is not None)

    def _attentions(self) -> list[Any]:
        return [each for each in self._decoder.modules() if hasattr(each, "layer_idx")]  # type: ignore[union-attr]

    # ---------- in place of what transformers does

    def _prepared(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Give `generate` a cache of ours, as long as it may get; and all ranks one seed, where it draws tokens."""
        with self._refusing():
            if getattr(generation_config, "max_time", None) is not None:
                raise UnsupportedError("max_time stops each rank by its own clock; ranks end together: leave it out")
            if model_kwargs.get(self._named) is None and generation_config.use_cache is not False:
                if generation_config.cache_implementation is not None:
                    raise UnsupportedError(
                        f"cache_implementation={generation_config.cache_implementation!r} is another cache than the "
                        f"one over ranks: leave it out"
                    )
                model_kwargs[self._named] = self.new_cache(_longest(generation_config))
        if self.cp.world_size > 1:
            draws = bool(generation_config.do_sample)
            fields = {"pass": "generate", "draws tokens": draws, "tokens at most": _longest(generation_config)}
            agree_together(self.cp, self.model.device, Description.of(fields))
            if draws:
                self._seed()
        return self._prepare(generation_config, model_kwargs, *args, **kwargs)

    def _refusing(self) -> refusing:
        """Guard checks of this rank's, which come before an agreement of all."""
        return refusing(self.cp, "forward", self.model.device)

    def _seed(self) -> None:
        """Seed the generators of all ranks with a number that rank 0 draws, so that all draw the same tokens."""
        transport = self.cp.transport_for(self.model.device)
        assert transport is not None  # there are several ranks
        mine = int(torch.randint(1 << (8 * SEED_BYTES), ()))
        told = transport.exchange(mine.to_bytes(SEED_BYTES, "little"), "the seed of sampling")
        torch.manual_seed(int.from_bytes(told[0], "little"))

    def _forward(
        self, input_ids: torch.Tensor | None = None, attention_mask: Any = None,
        position_ids: torch.Tensor | None = None, given: Any = None, inputs_embeds: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run the decoder stack on new tokens [B, T], in pieces; the hidden states are whole on every rank.

        given: the cache, which callers give by either of its names, too.
        """
        with self._refusing():
            for name in CACHES:
                if (other := kwargs.pop(name, None)) is not None:
                    if given is not None and other is not given:
                        raise ConfigurationError(f"two caches in one call: give one, as {self._named}")
                    given = other
            ids, cached = self._checked(input_ids, given, inputs_embeds, kwargs)
            batch, tokens = ids.shape
            past = cached.get_seq_length()
            cache = self.cache = cached.of_batch(batch, starts_of(attention_mask, batch, past + tokens))
            self.pieces = self._cut(tokens, cache)
            if torch.is_grad_enabled() and any(each.requires_grad for each in self.model.parameters()):
                raise UnsupportedError("a cache over ranks has no backward: call the model under torch.no_grad()")
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens, device=ids.device)[None]
        found, parts = None, []
        for first, last, home in self.pieces:
            places = torch.arange(first, last, device=ids.device)
            if home == "tokens":
                places = first + positions(self.cp, last - first, ids.device, mask=self._mask)
            with cache.step(ids[:, first:last], home):
                found = self._inner(
                    input_ids=ids[:, places], position_ids=position_ids[:, places],
                    **{**kwargs, self._named: cached, "use_cache": True},
                )  # fmt: skip
            layers = found.get("hidden_states") or ()  # where they were asked for, by the call or by the config
            parts.append([self._whole(each, home) for each in (found.last_hidden_state, *layers)])
        assert found is not None  # there is a token at least
        whole = [each[0] if len(each) == 1 else torch.cat(each, 1) for each in zip(*parts, strict=True)]
        found.last_hidden_state = whole[0]
        if len(whole) > 1:
            found.hidden_states = tuple(whole[1:])
        if given is None:
            setattr(found, self._named, None)
        return found

    def _whole(self, hidden: torch.Tensor, home: Home) -> torch.Tensor:
        """Return the hidden states of a piece on every rank."""
        return unshard(hidden, self.cp, 1, mask=self._mask) if home == "tokens" else hidden

    def _checked(
        self, ids: torch.Tensor | None, given: Any, embeds: Any, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Return the ids and the cache of a call. Raises UnsupportedError and ConfigurationError."""
        if ids is None or embeds is not None:
            raise UnsupportedError("a cache over ranks agrees on token ids: give input_ids, not inputs_embeds")
        if kwargs.get("output_attentions") or getattr(self._config, "output_attentions", False):
            raise UnsupportedError("attentions of layers are not gathered: leave output_attentions out")
        if given is None and kwargs.get("use_cache"):
            raise ConfigurationError(
                f"use_cache=True without a cache: give {self._named}=serving.new_cache(capacity), of the handle that "
                f"serve_with_tokenring returned, or leave use_cache out"
            )
        cached = self.new_cache(ids.shape[1]) if given is None else given
        if not hasattr(cached, "of_batch"):
            raise ConfigurationError(
                f"{self._named} is a {type(cached).__name__}, which lies at one rank: give a cache from "
                f"Serving.new_cache, or none"
            )
        return ids, cached

    @property
    def _mask(self) -> Any:
        """The mask by which layout "auto" cuts."""
        return Causal() if self.cp.layout == "auto" else None

    def _cut(self, tokens: int, cache: KVCache) -> list[Piece]:
        """Return the pieces of new tokens, and whether each is cut over the ranks."""
        made: list[Piece] = []
        at, longest = 0, tokens if self._chunk is None else self._chunk
        while at < tokens:
            left = min(longest, tokens - at)
            count = 0 if cache.starts is not None else self._cut_over_ranks(left)
            made.append((at, at + count, "tokens") if count else (at, at + left, "all"))
            at = made[-1][1]
        return made

    def _cut_over_ranks(self, tokens: int) -> int:
        """Return how many of the first of these tokens each rank computes its part of; 0: every rank computes all."""
        if self.cp.world_size == 1 or self._shard_from is None or tokens < self._shard_from:
            return 0
        unit = _unit(self.cp)
        if isinstance(self.cp.layout, Layout):  # it is of one length
            return unit if tokens >= unit and self.cp.layout.is_even else 0
        return tokens // unit * unit


def _unit(cp: ContextParallel) -> int:
    """Return of what a number of tokens is a multiple, where it divides into the chunks of the layout."""
    if isinstance(cp.layout, Layout):
        return cp.layout.length
    return len(cp.layout_for(1 << 20, Causal()).chunks)


def _name(cp: ContextParallel) -> str:
    return cp.layout.name if isinstance(cp.layout, Layout) else cp.layout


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, **other: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend from new tokens, q, k and v [B, H, T, D], as transformers calls it; the result is [B, T, H, D]."""
    serving: Serving | None = getattr(module, OF_MODULE, None)
    if serving is None or serving.cache is None:
        raise ConfigurationError(f"a {type(module).__name__} outside of serve_with_tokenring: call the whole model")
    layer, cache = int(module.layer_idx), serving.cache  # type: ignore[arg-type]
    if attention_mask is not None or dropout or other.get("softcap") or other.get("s_aux") is not None:
        raise UnsupportedError("masks of one's own, dropout, soft-capped scores and sinks have no cache over ranks")
    if not getattr(module, "is_causal", True) or sliding_window != cache.windows[layer]:
        raise UnsupportedError(
            f"layer {layer} has sliding_window={sliding_window}, and its cache {cache.windows[layer]}: this model's "
            f"layers differ from its config"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return cached_attention(q, k, v, cache, layer, scale=scaling), None


def name_of_cache() -> str:
    """Return the name that this transformers gives the cache in calls and outputs of models.

    Raises UnsupportedError for one that is not known.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    fields = BaseModelOutputWithPast.__dataclass_fields__
    for name in CACHES:
        if name in fields:
            return name
    raise UnsupportedError(
        f"models of this transformers return {', '.join(fields)}, and none of {' or '.join(CACHES)}: take a version "
        f"that docs/transformers.md names"
    )


def _longest(config: Any) -> int:
    """Return the tokens that a generation may cache; assisted decoding drops some of them again."""
    drafts = (getattr(config, name, None) or 0 for name in ("prompt_lookup_num_tokens", "num_assistant_tokens"))
    return int(config.max_length) + max(1, *drafts)


def windows_of(config: Any) -> list[int | None]:
    """Return how many tokens a token of each layer sees, as a config of transformers says; None: all."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedError(f"layers of kind {', '.join(sorted(unknown))} have no cache over ranks")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def starts_of(attention_mask: Any, batch: int, length: int) -> torch.Tensor | None:
    """Return the first token of each row, int64 [B], of a mask [B, length]; None: no row is padded.

    Raises UnsupportedError for any mask but one of padding on the left.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != (batch, length):
        shape = list(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
        raise UnsupportedError(f"attention_mask is {shape}: a cache over ranks takes padding, [{batch}, {length}]")
    shown = attention_mask.bool()
    if bool(shown.all()):
        return None
    starts = length - shown.sum(dim=1)
    if not torch.equal(shown, torch.arange(length, device=shown.device) >= starts[:, None]):
        raise UnsupportedError(
            "attention_mask hides tokens inside or at the end of a row: pad on the left (padding_side='left'), and "
            "give attention_mask=torch.ones_like(ids) where pad_token_id is an ordinary token of the prompt"
        )
    return starts
