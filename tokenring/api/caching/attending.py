"""The calls of cached attention: of rows that every rank has, and of rows that are each rank's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tokenring.api.attention import attend
from tokenring.api.caching.checks import CallForm, agree_on_form, checked_call
from tokenring.api.caching.choosing import exchange_name
from tokenring.api.caching.filling import Runs, runs_of
from tokenring.api.caching.memory import CacheMemory, Home
from tokenring.api.caching.model_step import ModelStep
from tokenring.api.caching.one_token import OneToken, one_token
from tokenring.api.caching.own_heads import HeadPart
from tokenring.api.caching.rows import merged, rows_over
from tokenring.errors import UnsupportedError
from tokenring.ir.cached_exchange import DIRECT_Q, ONE_SHOT, TWO_STEP
from tokenring.runtime.agreement import refusing
from tokenring.runtime.cached_exchange import Made, Rows
from tokenring.runtime.cached_kernel import Partial, cached_partial
from tokenring.sequence.layout import Layout, Positions
from tokenring.sequence.mask import Causal, Mask, SlidingWindow


def attended(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, cache: CacheMemory, layer: int, home: Home,
    scale: float | None, wants_lse: bool,
) -> Made:  # fmt: skip
    """Return out [B, H, T, Dv] and, if it is wanted, lse [B, H, T] in fp32; see `cached_attention`."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return attended(q, k, v, cache, layer, home, scale, wants_lse)
    step = cache.current
    if isinstance(step, ModelStep):
        if (found := _short(q, k, v, cache, layer, step, scale)) is not None:
            assert k is not None and v is not None
            return found.attend(q, k, v, layer, wants_lse, step.number)
        form = checked_call(q, k, v, cache, layer, step, scale)
        agree_on_form(form, cache, layer, step, q.shape[1] if k is None else None)
        return _call(q, k, v, cache, layer, step, form, wants_lse)

    made: list[CallForm] = []

    def check(step: ModelStep) -> dict[str, object]:
        made.append(checked_call(q, k, v, cache, layer, step, scale))
        return made[0].described(q.shape[1] if k is None else None)

    rows = q.shape[1] if isinstance(q, torch.Tensor) and q.dim() == 4 else 1
    with ModelStep(cache, rows, home, layer=layer, reads=k is None and v is None, call=check) as step:
        return _call(q, k, v, cache, layer, step, made[0], wants_lse)


def refuse_gradients(cache: CacheMemory) -> None:
    """Raise UnsupportedError; outside of a step on all ranks, which are about to agree."""
    refused = UnsupportedError("cached_attention has no backward: call it under torch.no_grad() or inference_mode()")
    if cache.current is not None:
        raise refused
    with refusing(cache.cp, "forward", cache.device):
        raise refused


def _short(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, cache: CacheMemory, layer: int, step: ModelStep,
    scale: float | None,
) -> OneToken | None:  # fmt: skip
    """Return the short way of a decode step, if this call takes it; made once for layers that hold the same."""
    if step.tokens != 1 or k is None or v is None or type(layer) is not int or not 0 <= layer < cache.layers:
        return None
    found = step.short
    if not isinstance(found, OneToken) or not found.serves(cache.filled[layer], scale):
        form = cache.forms[layer]  # ranks that have not agreed on it may not choose an exchange for it
        if form is None or not isinstance(q, torch.Tensor) or q.dim() != 4 or q.shape[2] != form[0]:
            return None
        found = step.short = one_token(q, cache, layer, step, scale)
    if found is None or (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype) != found.key:
        return None
    if cache.forms[layer] != found.form:  # the ranks have not agreed on it
        return None
    return found if q.is_cpu and k.is_cpu and v.is_cpu and q.is_contiguous() else None


def _call(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, cache: CacheMemory, layer: int, step: ModelStep,
    form: CallForm, wants_lse: bool,
) -> Made:  # fmt: skip
    call = SharedCall(q.transpose(1, 2), cache, layer, step, form, wants_lse)
    if k is None or v is None:
        return _read(call)
    if step.layout is not None and cache.cp.world_size > 1:
        return _attend_own(q, k, v, cache, layer, step, step.layout, form.scale)
    return _attend_shared(call, k.transpose(1, 2), v.transpose(1, 2))


class SharedCall(NamedTuple):
    """A call for tokens that every rank has, with all query heads or a part of them at each: q [B, H, T, D]."""

    q: torch.Tensor
    cache: CacheMemory
    layer: int
    step: ModelStep
    form: CallForm
    wants_lse: bool

    @property
    def own(self) -> HeadPart:
        """Return this rank's heads: all, or its part."""
        rank = self.cache.cp.rank if self.step.home == "heads" else 0
        return HeadPart(rank * self.q.shape[1], self.q.shape[1], self.form.heads)


def _attend_shared(call: SharedCall, k: torch.Tensor, v: torch.Tensor) -> Made:
    """Attend from new tokens that every rank has: to what each has sealed, and what all have."""
    cache, layer, tokens = call.cache, call.layer, call.q.shape[2]
    filled, sight, scale = cache.filled[layer], cache.sight(layer), call.form.scale
    after, held = filled.after(tokens, cache.room), filled.open + tokens
    open_keys, open_values = cache.open_keys[layer], cache.open_values[layer]
    written = held <= cache.room.open
    if written:
        keys, values = open_keys.narrow(2, 0, held), open_values.narrow(2, 0, held)
        keys.narrow(2, filled.open, tokens).copy_(k)
        values.narrow(2, filled.open, tokens).copy_(v)
    else:
        keys = torch.cat([open_keys[:, :, : filled.open], k], 2)
        values = torch.cat([open_values[:, :, : filled.open], v], 2)
    new_runs = (Positions(filled.length, filled.length + tokens),)

    def local(q: torch.Tensor, part: HeadPart) -> Partial:
        seen = part.kv(keys), part.kv(values)
        if tokens == 1 and sight.hides_nothing:
            return cached_partial(q, *seen, None, scale)
        return rows_over(q, new_runs, *seen, (*filled.open_runs, *new_runs), sight, scale)

    found = _over_sealed(call, new_runs, local)
    cache.appended(layer, k, v, after, written)
    return found


def _read(call: SharedCall) -> Made:
    """Attend from rows that every rank has to all that is cached, all of which they see but for padding."""
    cache, layer = call.cache, call.layer
    filled = cache.filled[layer]
    runs = (Positions(filled.length, filled.length + 1),) * call.q.shape[2]
    keys, values = (each[layer][:, :, : filled.open] for each in (cache.open_keys, cache.open_values))

    def local(q: torch.Tensor, part: HeadPart) -> Partial:
        seen = part.kv(keys), part.kv(values)
        return rows_over(q, runs, *seen, filled.open_runs, cache.sight(layer), call.form.scale)

    return _over_sealed(call, runs, local)


def _over_sealed(call: SharedCall, runs: Runs, local: Callable[[torch.Tensor, HeadPart], Partial]) -> Made:
    """Return what `local` makes, merged with what the ranks make of their sealed tokens for rows that all have."""
    q, cache, layer, own, world = call.q, call.cache, call.layer, call.own, call.cache.cp.world_size

    def sealed(rows: torch.Tensor) -> Partial:
        return _of_sealed(rows, runs, cache, layer, call.form.scale)

    if not any(cache.filled[layer].counts):
        return local(q, own)
    if world == 1:
        return merged(sealed(q), local(q, own))
    label = f"partial results of layer {layer} in step {call.step.number}"
    name = exchange_name(cache, call.step.home, call.step.schedule, call.form.heads, q)
    part = call.form.heads if name == ONE_SHOT else call.form.heads // world
    found = cache.exchange(name, Rows(q.shape[0], part, q.shape[2], cache.value_dim, cache.dtype))
    if name == DIRECT_Q:
        return found.own_heads(
            q.transpose(1, 2), lambda rows: sealed(rows.transpose(1, 2)), lambda: local(q, own), label
        )
    if name == TWO_STEP:

        def of_heads(first: int, count: int) -> Partial:
            mine = HeadPart(first, count, own.of)
            return local(mine.cut(q), mine)

        return found.in_two_steps(lambda: sealed(q), of_heads, label)
    return found.shared(lambda: sealed(q), lambda: local(q, own), label, call.wants_lse)


def _of_sealed(q: torch.Tensor, runs: Runs, cache: CacheMemory, layer: int, scale: float) -> Partial:
    """Return the partial result of rows q [B, H, T, D] over this rank's sealed tokens, all of which come before."""
    keys, values = cache.sealed(layer)
    sight = cache.sight(layer)
    if sight.hides_nothing:
        return cached_partial(q, keys, values, None, scale)
    return rows_over(q, runs, keys, values, cache.filled[layer].sealed[cache.cp.rank], sight, scale)


def _attend_own(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: CacheMemory, layer: int, step: ModelStep, layout: Layout,
    scale: float,
) -> Partial:  # fmt: skip
    """Attend from this rank's part of new tokens: to new ones by a schedule, to sealed ones where they lie."""
    filled, sight, cp = cache.filled[layer], cache.sight(layer), cache.cp
    mask: Mask = Causal() if sight.window is None else Causal() & SlidingWindow(sight.window - 1)
    out, lse = attend(q, k, v, cp, mask, scale, training=False, layout=layout)
    new = out.transpose(1, 2).float(), lse
    runs = [runs_of(layout, rank, filled.length) for rank in range(cp.world_size)]
    if filled.open:
        keys, values = (each[layer][:, :, : filled.open] for each in (cache.open_keys, cache.open_values))
        opened = rows_over(q.transpose(1, 2), runs[cp.rank], keys, values, filled.open_runs, sight, scale)
        new = merged(new, opened)
    found = new
    if any(filled.counts):
        rows = Rows(q.shape[0], q.shape[2], q.shape[1], cache.value_dim, cache.dtype)

        def sealed(rank: int, theirs: torch.Tensor) -> Partial:
            return _of_sealed(theirs.transpose(1, 2), runs[rank], cache, layer, scale)

        exchange = cache.exchange(DIRECT_Q, rows)
        found = exchange.own(q, sealed, lambda: new, f"rows and results of layer {layer} in step {step.number}")
    cache.sharded(layer, k.transpose(1, 2), v.transpose(1, 2), layout)
    return found
