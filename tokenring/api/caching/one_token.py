"""The short way of a decode step: one new token on a CPU, whose layers share all that can be found out once.

It gives what `attending` gives, to the bit, with fewer steps in between. What it does not take goes the long way.
"""

from __future__ import annotations

import torch

from tokenring.api.caching.checks import CallForm
from tokenring.api.caching.choosing import exchange_name
from tokenring.api.caching.filling import Filled
from tokenring.api.caching.memory import CacheMemory
from tokenring.api.caching.model_step import ModelStep
from tokenring.ir.cached_exchange import ONE_SHOT
from tokenring.runtime.bound_kernel import checked_scale
from tokenring.runtime.cached_exchange import PartialExchange, Rows, wait_for

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class OneToken:
    """A step of one token, for layers that hold the same as the one that it was made for."""

    __slots__ = (
        "_after", "_cache", "_exchange", "_filled", "_given", "_groups", "_local", "_lses", "_mine", "_new_keys",
        "_new_values", "_open_keys", "_open_values", "_outs", "_scale", "form", "key",
    )  # fmt: skip

    def __init__(
        self, cache: CacheMemory, filled: Filled, exchange: PartialExchange, q: torch.Tensor, scale: float | None
    ) -> None:
        self.form, self._given = CallForm(q.shape[2], checked_scale(scale, q.shape[3])), scale
        self._scale = self.form.scale
        self._filled, self._after = filled, filled.after(1, cache.room).filled
        at = filled.open  # of all layers at once, which takes less than layer by layer
        self._new_keys, self._new_values = (x.transpose(2, 3).narrow(2, at, 1).unbind(0) for x in cache.opened)
        self._open_keys, self._open_values = (x.narrow(3, 0, at + 1).unbind(0) for x in cache.opened)
        self._cache, self._exchange = cache, exchange
        batch, heads = q.shape[0], q.shape[2]
        self._groups = batch, cache.kv_heads, heads // cache.kv_heads, cache.head_dim
        made = exchange.made
        self._mine, self._local = (
            (made.outs[index].view(*self._groups), made.lses[index].view(self._groups[:3]))
            for index in (cache.cp.rank, len(made.each) - 1)
        )
        self._outs, self._lses = made.outs, made.lses[..., None]
        of_kv = torch.Size((batch, 1, cache.kv_heads, cache.head_dim))
        self.key = q.shape, of_kv, of_kv, cache.dtype, cache.dtype, cache.dtype

    def serves(self, filled: Filled, scale: float | None) -> bool:
        """Tell whether it is for layers that hold this, and still lies in memory that is used."""
        return self._filled is filled and self._given == scale and self._exchange.usable

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, wants_lse: bool, number: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return out [B, H, 1, D] and, if wanted, lse [B, H, 1], in fp32; k and v are appended."""
        cache, partials, scale = self._cache, self._exchange.partials, self._scale
        label = f"partial results of layer {layer} in step {number}"
        received = partials.receive(label)
        q = q.view(self._groups)  # the query heads of a kv head as its rows
        keys, values = cache.sealed(layer)
        out, lse = FLASH(q, keys, values, 0.0, False, scale=scale)
        self._mine[0].copy_(out)
        self._mine[1].copy_(lse)
        sent = partials.send(label)
        self._new_keys[layer].copy_(k)
        self._new_values[layer].copy_(v)
        out, lse = FLASH(q, self._open_keys[layer], self._open_values[layer], 0.0, False, scale=scale)
        self._local[0].copy_(out)
        self._local[1].copy_(lse)
        wait_for(received)
        wait_for(sent)
        cache.filled[layer] = self._after
        out = merge_seen(self._outs, self._lses)
        return out, torch.logsumexp(self._exchange.made.lses, dim=0) if wants_lse else None


def merge_seen(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Return what `merge_outs` does of outs [n, B, H, 1, D] and lses [n, B, H, 1, 1] of rows that saw a key each."""
    return torch.mul(outs, lses.softmax(dim=0)).sum(dim=0)


def one_token(
    q: torch.Tensor, cache: CacheMemory, layer: int, step: ModelStep, scale: float | None
) -> OneToken | None:
    """Return the short way for a call of this size; None: it goes the long way.

    Nothing in it depends on what the tensors hold, so that all ranks go the same way.
    """
    filled, alone = cache.filled[layer], cache.cp.world_size == 1
    if step.tokens != 1 or step.home != "all":
        return None
    if alone or filled.length != step.before or not cache.sight(layer).hides_nothing:
        return None
    if cache.device.type != "cpu" or cache.dtype != torch.float32 or cache.head_dim != cache.value_dim:
        return None
    if not isinstance(q, torch.Tensor) or q.dim() != 4 or q.shape[:2] != (cache.batch, 1):
        return None
    if q.shape[2] % cache.kv_heads:
        return None
    if not min(filled.counts) or filled.after(1, cache.room).deals or q.shape[3] != cache.head_dim:
        return None
    rows = Rows(q.shape[0], q.shape[2], 1, cache.value_dim, cache.dtype)
    if exchange_name(cache, step.home, step.schedule, q.shape[2], q.transpose(1, 2)) != ONE_SHOT:
        return None
    exchange = cache.exchange(ONE_SHOT, rows)
    return None if exchange.placed else OneToken(cache, filled, exchange, q, scale)
