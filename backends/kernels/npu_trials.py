"""Trials of the CANN beneath: a call alone shows if it computes what the schema of an operator takes.

op-plugin asks CANN for the kernel when it is called, and the two come in any pair: with softmax_layout in the schema
and aclnnFlashAttentionVarLenScoreV4 missing in CANN a call that says "TND" raises, and so, for itself, does the
gradient's without aclnnFlashAttentionUnpaddingScoreGradV4 (Ascend/op-plugin, FlashAttentionKernelNpuOpApi.cpp). So each
direction is tried once in a process on each device, on two sequences of a few tokens, against its own default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tokenring.backends.kernels.npu_operator import Operator, row_lse, statistics
from tokenring.errors import one_line

LOG = logging.getLogger("tokenring")
PACKED = "TND"
ENDS = [1, 3]  # of sequences of unlike length, or both orders would be one
HEADS, HEAD_DIM = 2, 16
LIMIT = 0.05  # of the largest number: another order differs by half of it and more, a kernel by what bf16 rounds


def packs_in_token_order(operator: Operator, device: torch.device) -> bool:
    """Return True if softmax_layout="TND" gives statistics of the layout TND as [T, N, 8]."""
    return operator.takes("softmax_layout") and _refused(operator, device) is None


@lru_cache(maxsize=64)
def _refused(operator: Operator, device: torch.device) -> str | None:
    """Return None, or why this operator has to go with blocks [N, S, 8] of each sequence; logged once."""
    tried = _gradient if operator.takes("softmax_max") else _forward
    try:
        with torch.no_grad():
            reason = _unlike(*tried(operator, device))
    except RuntimeError as error:  # from the operator: CANN has no such kernel
        reason = one_line(error)
    if reason is not None:
        LOG.info('%s on %s: statistics go in the default order, not by softmax_layout="TND": %s', operator.name, device,
                 reason)  # fmt: skip
    return reason


def _unlike(asked: torch.Tensor, default: torch.Tensor) -> str | None:
    """Return None, or the difference between numbers that should be the same."""
    asked, default = asked.cpu().double(), default.cpu().double()
    error = float((asked - default).abs().max() / default.abs().max())
    return None if error <= LIMIT else f"tried, it differs from the default order by {error:.1e}"


def _forward(operator: Operator, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lse [T, N] as asked for in token order, and by default."""
    call = _calling(operator, _operands(device), device)
    asked, default = (row_lse(*call(softmax_layout=layout)[1:3]) for layout in (PACKED, ""))
    return asked, _from_blocks(default)


def _gradient(operator: Operator, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dq [T, N, D] of statistics that are given in token order, and of the same in the default order."""
    q, k, v = _operands(device)
    call = _calling(operator, (q, k, v, v), device)
    lse = torch.arange(1.0, 1 + ENDS[-1] * HEADS).view(ENDS[-1], HEADS)
    made = [
        call(softmax_layout=layout, attention_in=v, **statistics(given.to(device)))[0]
        for layout, given in ((PACKED, lse), ("", _in_blocks(lse)))
    ]
    return made[0], made[1]


def _calling(operator: Operator, operands: tuple[torch.Tensor, ...], device: torch.device) -> Callable[..., Any]:
    """Return the operator on these operands, of the layout TND; its other options are still open."""

    def call(**options: Any) -> Any:
        return operator(
            *operands, HEADS, PACKED, scale=1.0, actual_seq_qlen=ENDS, actual_seq_kvlen=ENDS, **options
        )  # fmt: skip

    return call


def _operands(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make q, k and v [T, N, D], with logits that rise in one head and fall in the other."""
    tokens = torch.linspace(0.5, 1.0, ENDS[-1])[:, None, None]
    heads, dims = torch.linspace(1.0, -1.0, HEADS)[:, None], torch.linspace(0.5, 1.0, HEAD_DIM)
    q, k, v = ((tokens * x * dims).to(device, torch.bfloat16) for x in (heads, heads.abs(), heads + 2.0))
    return q, k, v


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return [T, N] whose memory holds [N, S] of each sequence, from one in token order."""
    parts = [x[start:stop].transpose(0, 1).flatten() for start, stop in zip([0, *ENDS], ENDS, strict=False)]
    return torch.cat(parts).view(x.shape)


def _from_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return [T, N] in token order, from one of `_in_blocks`."""
    flat, heads, parts = x.flatten(), x.shape[1], []
    for start, stop in zip([0, *ENDS], ENDS, strict=False):
        parts.append(flat[start * heads : stop * heads].view(heads, -1).transpose(0, 1))
    return torch.cat(parts)
