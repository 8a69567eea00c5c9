"""New tokens over latents by a schedule, where each rank has its part of both."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tokenring.api.autograd import forward_pass, rows_packed
from tokenring.api.inputs import request_of
from tokenring.runtime.agreement import refusing
from tokenring.runtime.latent_kernel import SharedLatents

if TYPE_CHECKING:
    import torch

    from tokenring.api.context import ContextParallel
    from tokenring.sequence.layout import Layout
    from tokenring.sequence.mask import Mask


def attend_new(
    q: torch.Tensor, keys: torch.Tensor, value_dim: int, cp: ContextParallel, mask: Mask, scale: float,
    layout: Layout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out [B, T, H, L] and lse [B, H, T] of new tokens over latents, by a schedule; latents travel once.

    q [B, T, H, L + R] and keys [B, S, 1, L + R] are each rank's part of them, in this layout, or in cp's.
    """
    with refusing(cp, "forward", q, keys):
        plain = request_of(q, keys, keys[..., :value_dim], cp, mask, scale, False, False, layout=layout)
        request = replace(plain, workload=replace(plain.workload, latent_dim=keys.shape[-1]))
        q, keys = rows_packed(q), rows_packed(keys)
    return forward_pass(cp, request, q, keys, keys[..., :0], None, expansion=SharedLatents(value_dim))[:2]
