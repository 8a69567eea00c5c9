"""The kernel of one program, with what it reads beside its operands."""

from __future__ import annotations

import torch

from tokenring.backends.interfaces import AttentionKernel, MaskingKernel, Tiles
from tokenring.lowering.program import Attend, Program
from tokenring.sequence.workload import Workload


def holding(kernel: AttentionKernel, program: Program, workload: Workload, device: torch.device) -> AttentionKernel:
    """The kernel with the masks of all tiles of a program, where it has any: whoever holds it holds them."""
    patches = dict.fromkeys(each.patch for each in program.instructions if isinstance(each, Attend))
    return held(kernel, Tiles(tuple(patches), program.direction, workload.head_dim, workload.dtype, device))


def held(kernel: AttentionKernel, tiles: Tiles) -> AttentionKernel:
    """The same for some tiles."""
    return kernel.holding(tiles) if isinstance(kernel, MaskingKernel) else kernel
