"""Ways to take a step over a KV cache, to be raced or traced; and by hand: kernel, all-gather over Gloo, merge.

B batch, T new tokens, S cached ones, H query heads, Hkv kv heads, D dimension of a head, Dv of its values, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tokenring as tr
from tokenring.api.caching.choosing import AUTO, DIRECT_KV, RING, exchange_name, own_exchange
from tokenring.api.caching.memory import Home
from tokenring.backends.merging.all_at_once import merge_all
from tokenring.cli.bench.candidates import WAIT_SECONDS, emulated
from tokenring.cli.bench.race import SEED
from tokenring.cli.bench.results import CachedCase
from tokenring.cli.bench.sleeping import SleepingContext
from tokenring.cli.spelling import new_tokens_text
from tokenring.ir.cached_exchange import DIRECT_Q, ONE_SHOT, TWO_STEP
from tokenring.runtime.cached_kernel import Partial, cached_partial

WAYS: dict[str, tuple[Home, str]] = {  # who has the new tokens, and what the step is told
    "auto": ("all", AUTO),
    "one-shot": ("all", ONE_SHOT),
    "two-step": ("all", TWO_STEP),
    "direct-q/heads": ("heads", DIRECT_Q),
    "direct-q/tokens": ("tokens", DIRECT_Q),
    "auto/tokens": ("tokens", AUTO),
    "direct-kv": ("tokens", DIRECT_KV),
    "ring": ("tokens", RING),
}
OF_NEW_TOKENS = DIRECT_Q  # the schedule of new tokens among themselves, the same in all ways
BLOCK_ROWS = 256  # of scores in float64
PAGE = 64  # tokens of a cache that are sealed together

Context = Callable[..., tr.ContextParallel]


def why_not(case: CachedCase, name: str, ranks: int) -> str | None:
    """Return why a way cannot take such a step; None: it can."""
    home = WAYS[name][0]
    if (home == "heads" or name == TWO_STEP) and case.heads % ranks:
        return f"it cuts query heads over the ranks, and {case.heads} do not divide over {ranks}"
    if home == "tokens" and case.tokens % ranks:
        new = new_tokens_text(case.tokens)
        return f"each rank has its part of the new tokens, and {new} cannot be cut over {ranks} ranks"
    return None


@dataclass(frozen=True)
class StepTensors:
    """The tensors of a step: q [B, T, H, D], new k and v of all ranks, and this rank's cached k and v, [B, n, Hkv, D].

    v of latents are the first elements of k.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cached_k: torch.Tensor
    cached_v: torch.Tensor

    @classmethod
    def of(cls, case: CachedCase, rank: int, ranks: int) -> StepTensors:
        """Make them: the new tokens from one seed on all ranks, what is cached from one of this rank's."""
        dtype = getattr(torch, case.dtype)
        alike, own = (torch.Generator().manual_seed(seed) for seed in (SEED, SEED + 1 + rank))

        def made(tokens: int, heads: int, dim: int, draw: torch.Generator) -> torch.Tensor:
            return torch.randn(case.batch, tokens, heads, dim, generator=draw).to(dtype)

        def pair(tokens: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
            k = made(tokens, case.kv_heads, case.head_dim, draw)
            v = k[..., : case.value_dim] if case.latents else made(tokens, case.kv_heads, case.value_dim, draw)
            return k, v

        q = made(case.tokens, case.heads, case.head_dim, alike)
        return cls(q, *pair(case.tokens, alike), *pair(case.cached // ranks, own))

    def of_home(self, home: Home, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of the new tokens as this rank gives them."""
        if home == "tokens":
            q, k, v = (x.chunk(ranks, 1)[rank].contiguous() for x in (self.q, self.k, self.v))
            return q, k, v
        return self.own(self.q, home, rank, ranks).contiguous(), self.k, self.v

    @staticmethod
    def own(x: torch.Tensor, home: Home, rank: int, ranks: int) -> torch.Tensor:
        """Return what is this rank's of q or out of all rows and heads: [B, T, H, D]."""
        return x if home == "all" else x.chunk(ranks, 1 if home == "tokens" else 2)[rank]


class CachedStep:
    """A cache that holds a case's tokens, and the calls of one layer that take a step over it."""

    def __init__(self, case: CachedCase, tensors: StepTensors, make: Context, transport: Any) -> None:
        self.case, self.tensors = case, tensors
        how: dict[str, Any] = {"layout": case.layout, "timeout_seconds": WAIT_SECONDS}
        topology = None if case.emulate is None else emulated(case.emulate, case.compute_tflops)
        self.cp = make(schedule=OF_NEW_TOKENS, transport=transport, topology=topology, **how)
        self.cp.check_open()
        room = case.cached + 2 * case.tokens + 2 * self.cp.world_size * PAGE
        self.cache = tr.KVCache(
            self.cp, layers=1, kv_heads=case.kv_heads, head_dim=case.head_dim, capacity=room, batch=case.batch,
            value_dim=None if case.latents else case.value_dim, latent_dim=case.value_dim if case.latents else None,
            dtype=getattr(torch, case.dtype), page=PAGE,
        )  # fmt: skip
        for name in (DIRECT_KV, RING) if self.cp.world_size > 1 else ():
            self.cache.movers[name] = make(schedule=name, transport=self.cp.transport, **how)
        self._fill()

    def _fill(self) -> None:
        """Seal what is cached where it lies after a prefill: to attend among it would take its length squared."""
        k, v = (x.transpose(1, 2) for x in (self.tensors.cached_k, self.tensors.cached_v))
        with self.cache.step(self.case.cached, "tokens") as step:
            assert step.layout is not None
            self.cache.sharded(0, k, v, step.layout)

    @contextmanager
    def begun(self, name: str) -> Iterator[None]:
        """Hold a step of this way; the cache is as before afterwards."""
        home, schedule = WAYS[name]
        with self.cache.step(self.case.tokens, home, schedule):  # type: ignore[arg-type]
            yield
        self.cache.drop(self.case.tokens)

    def call(self, name: str) -> torch.Tensor:
        """Attend in a step that has begun; return out of this rank's rows and heads."""
        home, _ = WAYS[name]
        q, k, v = self.tensors.of_home(home, self.cp.rank, self.cp.world_size)
        return self.attend(q, k, v, home)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, home: Home) -> torch.Tensor:
        """Attend from these rows; see `cached_attention`."""
        return tr.cached_attention(q, k, None if self.case.latents else v, self.cache, 0, q_home=home)

    def taken(self, name: str) -> str:
        """Return the exchange that a way takes. All ranks ask together: rank 0 chooses for "auto"."""
        home, schedule = WAYS[name]
        if schedule != AUTO or self.cp.world_size == 1:
            return schedule
        q, _, _ = self.tensors.of_home(home, self.cp.rank, self.cp.world_size)
        if home == "tokens":
            return own_exchange(self.cache, 0, schedule, q)
        return exchange_name(self.cache, home, schedule, self.case.heads, q.transpose(1, 2))

    def close(self) -> None:
        """Give back the memory, and the transport if it was made here."""
        self.cache.close()
        self.cp.close()


def context_of(case: CachedCase) -> Context:
    """Return what makes contexts: with kernels that compute, or that sleep where the case says so."""
    rate = case.compute_tflops
    return tr.ContextParallel if rate is None else lambda **how: SleepingContext(rate, **how)


def by_hand(
    q: torch.Tensor, sealed: tuple[torch.Tensor, torch.Tensor], opened: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float, visible: torch.Tensor | None = None, kernel: Callable[..., Partial] = cached_partial,
) -> Partial:  # fmt: skip
    """Attend as a few lines by hand would: kernel, all-gather of partial results over Gloo, merge. No cache grows.

    q [B, H, T, D] on all ranks; sealed: this rank's k and v [B, Hkv, n, D]; opened: those that all ranks have, of which
    rows see what `visible` (bool [1, 1, T, n]; None: all) says. Returns out [B, H, T, Dv] in fp32, and lse [B, H, T].
    """
    out, lse = kernel(q, *sealed, None, scale)
    mine = torch.cat([out, lse[..., None]], -1).contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    if opened is not None:
        out, lse = kernel(q, *opened, visible, scale)
        parts.append(torch.cat([out, lse[..., None]], -1))
    every = torch.stack(parts)
    return merge_all(every[..., :-1], every[..., -1])


def wanted_out(case: CachedCase, tensors: StepTensors) -> torch.Tensor:
    """Return out [B, T, H, Dv] of all rows and heads in float64, on every rank: all of them call it.

    Each rank attends to what it has cached, head by head with plain products; log-sum-exps join the parts and, at each
    rank alike, the new tokens, of which a row sees those up to its own. No code of the ways is in it.
    """
    parts = _gathered(_attended64(case, tensors.q, tensors.cached_k, tensors.cached_v, None))
    causal = torch.ones(case.tokens, case.tokens, dtype=torch.bool).tril()
    parts.append(_attended64(case, tensors.q, tensors.k, tensors.v, causal))
    every = torch.stack(parts)
    sums, lses = every[..., :-1], every[..., -1:]
    return (sums * (lses - lses.logsumexp(0)).exp()).sum(0)


def _gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


def _attended64(
    case: CachedCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """Return out and, as a last element, lse of each row and head in float64: [B, T, H, Dv + 1]."""
    group, found = case.heads // case.kv_heads, []
    for head in range(case.heads):
        rows, keys, values = (x[:, :, at].double() for x, at in ((q, head), (k, head // group), (v, head // group)))
        made = []
        for first in range(0, case.tokens, BLOCK_ROWS):
            scores = rows[:, first : first + BLOCK_ROWS] @ keys.transpose(1, 2) / case.head_dim**0.5
            if visible is not None:
                scores = scores.masked_fill(~visible[first : first + BLOCK_ROWS], -torch.inf)
            made.append(torch.cat([scores.softmax(-1) @ values, scores.logsumexp(-1, keepdim=True)], -1))
        found.append(torch.cat(made, 1))
    return torch.stack(found, 2)
