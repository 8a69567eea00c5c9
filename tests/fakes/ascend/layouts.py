"""From the operators' layouts to [B, N, S, D] and back, and the two memory orders of packed statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend.golden import COPIES


def heads_first(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """[B, N, S, D] from any layout but TND."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    split = x.reshape(*x.shape[:-1], heads, -1)
    return split.permute(0, 2, 1, 3) if layout == "BSH" else split.permute(1, 2, 0, 3)


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The opposite of heads_first."""
    if layout == "BNSD":
        return x.contiguous()
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    return (x.transpose(1, 2) if layout == "BSH" else x.permute(2, 0, 1, 3)).flatten(2).contiguous()


def kv_heads(x: torch.Tensor, layout: str, query: torch.Tensor, heads: int) -> int:
    """How many kv heads there are; where heads and D are one axis, all heads have the query's D."""
    if layout == "BNSD":
        return x.shape[1]
    if layout == "BSND":
        return x.shape[2]
    return max(1, x.shape[-1] * heads // query.shape[-1])


def copies(x: torch.Tensor) -> torch.Tensor:
    """Eight equal copies of a statistic, in fp32."""
    return x.float()[..., None].expand(*x.shape, COPIES).contiguous()


def pack_statistics(parts: Sequence[torch.Tensor], tokens: int, layout: str) -> torch.Tensor:
    """[tokens, N, 8] from [N, S_i] of each sequence; rows that belong to none are poisoned.

    Without a layout the memory holds [N, S_i, 8] blocks one after another, whatever the shape says.
    """
    heads = parts[0].shape[0]
    blocks = [copies(x if layout == "" else x.transpose(0, 1)).flatten() for x in parts]
    held = torch.cat(blocks)
    rest = torch.full((tokens * heads * COPIES - held.numel(),), float("nan"))
    return torch.cat([held, rest]).view(tokens, heads, COPIES)


def unpack_statistics(x: torch.Tensor, lengths: Sequence[int], layout: str) -> list[torch.Tensor]:
    """[N, S_i] of each sequence, as pack_statistics took them."""
    heads, flat, at, made = x.shape[1], x[..., 0].flatten(), 0, []
    for length in lengths:
        block = flat[at : at + heads * length]
        made.append(block.view(heads, length) if layout == "" else block.view(length, heads).transpose(0, 1))
        at += heads * length
    return made
