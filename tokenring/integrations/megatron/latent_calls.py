"""Calls in which latents may travel, and the choice between these and keys and values."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tokenring.api.context import ContextParallel
from tokenring.api.latents import attend_latents_as, latent_request
from tokenring.display.units import time_text
from tokenring.integrations.megatron.predictions import seconds_of
from tokenring.runtime.agreement import refusing
from tokenring.runtime.latent_kernel import Expansion
from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Request

if TYPE_CHECKING:
    from tokenring.sequence.layout import Layout

LOG = logging.getLogger("tokenring")


@dataclass(frozen=True)
class LatentCall:
    """Queries [B, T, H, D], latents with what every key ends with [B, T, 1, L + R], and the projection's weight."""

    q: torch.Tensor
    both: torch.Tensor
    weight: torch.Tensor
    value_dim: int

    def attend(self, cp: ContextParallel, request: Request) -> torch.Tensor:
        """Return out [B, T, H, Dv]; latents travel."""
        return attend_latents_as(self.q, self.both, self.weight, cp, request)[0]

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k [B, T, H, D] and v [B, T, H, Dv] of all heads, as the layer would have made them."""
        made = Expansion(self.weight, self.q.shape[2], self.value_dim).expanded(self.both.transpose(1, 2))
        return made[0].transpose(1, 2), made[1].transpose(1, 2)


def prepared_latents(
    cp: ContextParallel, q: torch.Tensor, both: torch.Tensor, weight: torch.Tensor, value_dim: int, mask: Mask,
    scale: float, training: bool, layout: Layout | None,
) -> tuple[LatentCall, Request]:  # fmt: skip
    """Return a call that all ranks make, and its request in which latents travel; errors reach all ranks."""
    with refusing(cp, "forward", q, both, weight):
        q, both, weight, request = latent_request(q, both, weight, value_dim, cp, mask, scale, training, layout)
    return LatentCall(q, both, weight, value_dim), request


def latents_pay(cp: ContextParallel, latents: Request) -> bool:
    """Tell whether a call is predicted to be as fast, or faster, with latents that travel than with keys and values.

    Fewer bytes are not all: each rank makes keys and values of every tile that it computes, and schedules that split
    heads, which do not do that, take no latents. All ranks of the group ask together; rank 0 logs the answer.
    """
    size = latents.workload
    whole = replace(latents, workload=replace(size, latent_dim=None, kv_heads=size.q_heads))
    plans = [cp.agreed_plan(each) for each in (latents, whole)]
    with_latents, without = (seconds_of(plan, plan.name) for plan in plans)
    pays = with_latents <= without
    if dist.get_rank() == 0:
        LOG.info(
            "latents of %s elements of a token %s: %s is predicted with %s, and %s with keys and values by %s",
            size.latent_dim, "travel" if pays else "do not travel", time_text(with_latents), plans[0].name,
            time_text(without), plans[1].name,
        )  # fmt: skip
    return pays
