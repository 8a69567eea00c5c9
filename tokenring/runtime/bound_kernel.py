"""The kernel of one program, with what it reads beside its operands."""

from __future__ import annotations

import torch

from tokenring.backends.interfaces import AttentionKernel, MaskingKernel, Tiles
from tokenring.lowering.program import Attend, Program
from tokenring.sequence.workload import Workload


def holding(kernel: AttentionKernel, program: Program, workload: Workload, device: torch.device) -> AttentionKernel:
    """Return a kernel that holds the masks of all tiles of a program, if it uses any; they live as long as it does."""
    patches = dict.fromkeys(each.patch for each in program.instructions if isinstance(each, Attend))
    return held(kernel, Tiles(tuple(patches), program.direction, workload.head_dim, workload.dtype, device))


def held(kernel: AttentionKernel, tiles: Tiles) -> AttentionKernel:
    """Return a kernel that holds the masks of these tiles, if it uses any; they live as long as it does."""
    return kernel.holding(tiles) if isinstance(kernel, MaskingKernel) else kernel
