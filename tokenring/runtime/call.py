"""One attention call as it runs: its tensors, and the steps of a bound program that are done to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tokenring.backends.interfaces import Work


@dataclass
class ActiveCall:
    """The tensors of one call. `own` holds q, k, v, dout [B, T, H, D] and lse, delta [B, H, T] by name."""

    own: dict[str, torch.Tensor]
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # slot → bytes that outlive the pass
    outputs: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # slot → field → [T, B, H, ...]
    handles: dict[int, Work] = field(default_factory=dict)


Step = Callable[[ActiveCall], None]
