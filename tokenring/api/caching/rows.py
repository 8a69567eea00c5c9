"""Partial results of rows at known positions over keys at known positions: which pairs are visible, and the kernel."""

from __future__ import annotations

import torch

from tokenring.api.caching.filling import CacheSight, Runs, cut, places
from tokenring.backends.merging.all_at_once import merge_all
from tokenring.runtime.cached_kernel import Partial, cached_partial

BLOCK_ROWS = 256  # of a mask that is made


def rows_over(
    q: torch.Tensor, q_runs: Runs, k: torch.Tensor, v: torch.Tensor, kv_runs: Runs, sight: CacheSight, scale: float
) -> Partial:
    """Return out [B, H, T, Dv] and lse [B, H, T] in fp32 of rows q [B, H, T, D] over k, v [B, Hkv, S, D].

    q_runs, kv_runs: the positions of rows and keys, each ascending run by run. A row sees keys up to its own position.
    """
    if sight.window is not None and q.shape[2]:
        behind = min(run.start for run in q_runs) - sight.window  # what no row sees any more
        skipped, kv_runs = _after(kv_runs, behind)
        k, v = k[:, :, skipped:], v[:, :, skipped:]
    if not q.shape[2] or not k.shape[2] or not _hides(q_runs, kv_runs, sight):
        return cached_partial(q, k, v, None, scale)
    kv_at = places(kv_runs, q.device)
    made = []
    for first in range(0, q.shape[2], BLOCK_ROWS):
        q_at = places(cut(q_runs, first, BLOCK_ROWS), q.device)
        block = q[:, :, first : first + BLOCK_ROWS]
        low, high = _seen(q_at, kv_at, sight)
        visible = _visible(q_at, kv_at[low:high], sight)
        made.append(cached_partial(block, k[:, :, low:high], v[:, :, low:high], visible, scale))
    if len(made) == 1:
        return made[0]
    return torch.cat([out for out, _ in made], dim=2), torch.cat([lse for _, lse in made], dim=2)


def merged(*parts: Partial) -> Partial:
    """Return what partial results of the same rows make together."""
    if len(parts) == 1:
        return parts[0]
    return merge_all(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))


def _after(runs: Runs, behind: int) -> tuple[int, Runs]:
    """Return the runs without the first of them that end at a position or before, and how many tokens those have."""
    skipped = 0
    for index, run in enumerate(runs):
        if run.last > behind:
            return skipped, runs[index:]
        skipped += len(run)
    return skipped, ()


def _hides(q_runs: Runs, kv_runs: Runs, sight: CacheSight) -> bool:
    """Tell whether any row does not see every key."""
    first, last = min(run.start for run in q_runs), max(run.last for run in q_runs)
    oldest, newest = min(run.start for run in kv_runs), max(run.last for run in kv_runs)
    behind = sight.window is not None and oldest <= last - sight.window
    return newest > first or behind or oldest < sight.latest


def _seen(q_at: torch.Tensor, kv_at: torch.Tensor, sight: CacheSight) -> tuple[int, int]:
    """Return the smallest range of keys that holds all that these rows see by their order and the window."""
    shown = kv_at <= q_at.max()
    if sight.window is not None:
        shown &= kv_at > q_at.min() - sight.window
    found = shown.nonzero()
    return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)


def _visible(q_at: torch.Tensor, kv_at: torch.Tensor, sight: CacheSight) -> torch.Tensor:
    """Return which rows see which keys: bool [B or 1, 1, T, S]."""
    distance = q_at[:, None] - kv_at[None]
    shown = distance >= 0
    if sight.window is not None:
        shown &= distance < sight.window
    if sight.starts is None:
        return shown[None, None]
    return shown[None, None] & (kv_at >= sight.starts[:, None])[:, None, None]
