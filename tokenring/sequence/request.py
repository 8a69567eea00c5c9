"""The request of one attention call, by which plans, programs and descriptions are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Workload


@dataclass(frozen=True)
class Request:
    """One kind of attention call, as this rank sees it.

    training: gradients are enabled. differentiable: an input wants some, also where they are not enabled now, as in a
    reentrant checkpoint; ranks may differ in that. backward: a plan is for both passes.
    """

    workload: Workload
    mask: Mask
    scale: float
    training: bool
    device: torch.device
    differentiable: bool = field(default=False, compare=False)
    backward: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "backward", self.training or self.differentiable)
