"""Attention sinks: a column of the softmax with a logit for each head, and no value (StreamingLLM; learned in gpt-oss).

They are no part of a schedule. A rank gives its own rows the sink once these are merged: out' = out · exp(lse - lse')
with lse' = logaddexp(lse, sink). In backward the program that there is gets out' and lse' for out and lse: then
p = exp(s - lse') and delta = rowsum(dout · out') are those of rows with a sink, wherever they are computed.
"""

from __future__ import annotations

import torch

from tokenring.backends.kernels.delta import rows_delta


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [B, T, H, D], in fp32, and lse [B, H, T] of rows that see a sink too. sinks [H]."""
    sink = sinks.detach().float()[:, None]
    larger = torch.maximum(lse, sink)
    base = larger.masked_fill(larger == float("-inf"), 0.0)  # where neither is seen
    share, other = torch.exp(lse - base), torch.exp(sink - base)
    total, weight = base + torch.log(share + other), share / (share + other).clamp_min_(1.0)
    return out.float() * weight.transpose(1, 2)[..., None], total


def sinks_gradient(
    sinks: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """Return this rank's part of the gradient of the sinks, -p · delta added up. out, lse: as `with_sinks` made them.

    A row that sees nothing else has out 0, and so delta 0 but for a gradient of its lse, which is the sink's logit.
    """
    p = torch.exp(sinks.detach().float()[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return (p * rows_delta(dout, out, lse, dlse)).sum(dim=(0, 2)).neg().to(sinks.dtype)
