"""Balanced layouts for those who keep torch's own context parallelism: a load balancer for its `context_parallel`.

    balancer = load_balancer(tr.Causal() & tr.Documents(cu_seqlens), length, mesh.size(), device)
    q, k, v = _context_parallel_shard(mesh, (q, k, v), (2, 2, 2), balancer)

torch's interface for this is private (torch.distributed.tensor.experimental._context_parallel, since 2.9).
"""

from __future__ import annotations

from typing import Any

import torch

from tokenring.api.cuts import Cuts
from tokenring.errors import BackendUnavailable
from tokenring.sequence.layout import split_order
from tokenring.sequence.mask_words import MaskLike, mask_of


def load_balancer(mask: MaskLike, length: int, world_size: int, device: torch.device | str = "cpu") -> Any:
    """Return torch's `_LoadBalancer` that gives each rank the tokens of the layout "auto" of a mask.

    Its indices are int64 [1, length]. Raises ConfigurationError, BackendUnavailable.
    """
    try:
        from torch.distributed.tensor.experimental._context_parallel._load_balancer import _LoadBalancer
    except ImportError as error:
        raise BackendUnavailable(
            f"torch {torch.__version__} has no load balancers for context parallelism: they came with torch 2.9"
        ) from error
    order = torch.tensor(split_order(Cuts(world_size).of(length, mask_of(mask))), device=device)[None]

    class Balanced(_LoadBalancer):
        """The order of tokens in which equal neighbouring parts are the ranks' own."""

        def _generate_indices(self, restore: bool = False) -> torch.Tensor:
            return torch.argsort(order, dim=1) if restore else order

    return Balanced()
