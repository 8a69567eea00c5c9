"""The checks of a call of cached attention, and the agreement of all ranks on its query heads, scale and rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenring.api.caching.agreeing import agree_together
from tokenring.api.caching.memory import CacheMemory
from tokenring.api.caching.model_step import ModelStep
from tokenring.errors import ConfigurationError
from tokenring.runtime.agreement import Description
from tokenring.runtime.bound_kernel import checked_scale
from tokenring.sequence.layout import as_integer


class CallForm(NamedTuple):
    """The query heads of a layer's calls, those of all ranks, and their scale: the same in all its calls in steps."""

    heads: int
    scale: float

    @property
    def in_fp32(self) -> tuple[int, float]:
        """Return the form with a scale as near as fp32 goes: D ** -0.5 and 1 / sqrt(D) differ beyond that."""
        return self.heads, torch.tensor(self.scale, dtype=torch.float32).item()

    def described(self, rows: int | None) -> dict[str, object]:
        """Return what ranks compare. rows: of a read; None: keys are given, and their number is that of the step."""
        read = {} if rows is None else {"rows of the read": rows}
        return {"query heads": self.heads, "scale": repr(self.in_fp32[1]), **read}


def checked_call(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, cache: CacheMemory, layer: int, step: ModelStep,
    scale: float | None,
) -> CallForm:  # fmt: skip
    """Return the form of a call. Raises ConfigurationError unless it fits the cache and its step."""
    if cache.latents and v is not None:
        raise ConfigurationError(
            f"v was given, and values of this cache are the first {cache.value_dim} elements of latents: give v=None"
        )
    if (k is None) != (v is None) and not cache.latents:
        raise ConfigurationError("cached_attention: give both k and v, or neither to read only")
    _check_query(q, cache, layer, step)
    if k is not None:
        _check_new(q, k, v, cache, layer, step)
    elif step.layout is not None and cache.cp.world_size > 1:
        raise ConfigurationError(
            f"a read in step {step.number}, whose rows are each rank's own: reading is for rows that every rank has"
            f"; give k and v, or read in a step of q_home='all'"
        )
    return CallForm(q.shape[2] * parts_of_heads(step), checked_scale(scale, q.shape[-1]))


def parts_of_heads(step: ModelStep) -> int:
    """Return over how many ranks the query heads of a step are split."""
    return step.cache.cp.world_size if step.home == "heads" else 1


def agree_on_form(form: CallForm, cache: CacheMemory, layer: int, step: ModelStep, reads: int | None) -> None:
    """Agree on the form of a layer at its first call in a step, and on each read. reads: the rows of a read.

    Raises Disagreement, on all ranks, before anything moves; ConfigurationError for another form than a layer has.
    """
    if cache.cp.world_size == 1:
        return
    known = cache.forms[layer]
    if known is not None and CallForm(*known).in_fp32 != form.in_fp32:
        raise ConfigurationError(
            f"layer {layer} is called with {form.heads} query heads and scale {form.scale!r}, and the ranks agreed "
            f"on {known[0]} and {known[1]!r}: give what its first call had, or make another cache"
        )
    if known is None or reads is not None:
        what = f"{'a read of ' if reads is not None else ''}layer {layer} in step {step.number}"
        agree_together(cache.cp, cache.device, Description.of({"pass": what, **form.described(reads)}))
        cache.forms[layer] = form


def _check_query(q: torch.Tensor, cache: CacheMemory, layer: int, step: ModelStep) -> None:
    """Raise ConfigurationError unless q and the layer fit the cache and its step."""
    if not isinstance(q, torch.Tensor):
        raise ConfigurationError(f"q is of type {type(q).__name__}; give a tensor [B, T, H, D]")
    cache.check_open()
    at = as_integer(layer)
    if at is None or not 0 <= at < cache.layers:
        raise ConfigurationError(f"layer={layer!r}: the cache has layers 0 to {cache.layers - 1}")
    if step.layer is not None and step.layer != layer:
        raise ConfigurationError(f"layer {layer} in a step of layer {step.layer}")
    parts = parts_of_heads(step)
    if q.dim() != 4 or q.shape[0] != cache.batch or q.shape[3] != cache.head_dim or q.shape[2] * parts % cache.kv_heads:
        part = "" if parts == 1 else f"; each rank gives an equal part of them, Hq/{parts}"
        raise ConfigurationError(
            f"q is {list(q.shape)}: this cache takes [{cache.batch}, T, Hq, {cache.head_dim}] with Hq a multiple of "
            f"{cache.kv_heads}{part}"
        )
    _check_kind("q", q, cache)


def _check_kind(name: str, x: torch.Tensor, cache: CacheMemory) -> None:
    if x.dtype != cache.dtype or x.device != cache.device:
        raise ConfigurationError(f"{name} is {x.dtype} on {x.device}, and the cache {cache.dtype} on {cache.device}")


def _check_new(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, cache: CacheMemory, layer: int, step: ModelStep
) -> None:
    """Raise ConfigurationError unless new keys and values fit q, the cache and the step."""
    tokens = step.local_tokens
    if cache.filled[layer].length != step.before:
        raise ConfigurationError(f"layer {layer} has its tokens of step {step.number}: call it once in each step")
    if isinstance(k, torch.Tensor) and v is None:
        v = cache.as_values(k)
    if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
        raise ConfigurationError(f"k and v are of type {type(k).__name__} and {type(v).__name__}; give tensors")
    wanted = [(cache.batch, tokens, cache.kv_heads, width) for width in (cache.head_dim, cache.value_dim)]
    if q.shape[1] != tokens or k.shape != wanted[0] or v.shape != wanted[1]:
        raise ConfigurationError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: step {step.number} has {tokens} tokens at rank "
            f"{cache.cp.rank}, so give k {list(wanted[0])} and v {list(wanted[1])}"
        )
    _check_kind("k", k, cache)
    _check_kind("v", v, cache)
