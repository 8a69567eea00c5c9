"""torch.compile of models around attention(), also with inductor, which makes C++ of what stands around."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from oracle import relative_error
from ranks import Here, RankPools
from test_compile import CALL_SECONDS, KEEPING, compiler

import tokenring as tr
from tokenring import ContextParallel, attention, shard


class Block(torch.nn.Module):
    """Attention with its projections, 64 wide."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp = cp
        self.project, self.back = torch.nn.Linear(64, 128), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (8, 16)).split((4, 2, 2), dim=2)
        out = tr.attention(q, k, v, self.cp, mask=tr.Causal() & tr.SlidingWindow(40))
        return x + torch.nn.functional.silu(self.back(out.flatten(2)))


def trained(here: Here, folder: str, backend: str) -> list[float]:
    """Errors against eager: of the output, of the gradients of the input and of all parameters."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{here.rank}"
    # The ranks may be far apart while they compile.
    cp = ContextParallel(layout="zigzag", schedule=KEEPING, transport="gloo", timeout_seconds=60.0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(cp), Block(cp))
    x = shard(torch.randn(2, 64, 64), cp).requires_grad_()
    leaves = [x, *model.parameters()]
    with compiler(), torch._inductor.config.patch(compile_threads=1):
        made = torch.compile(model, backend=backend, fullgraph=True)
        pairs = []
        for call in (made, model):
            out = call(x)
            pairs.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    cp.close()
    return [relative_error(a, b) for a, b in zip(*pairs, strict=True)]


def test_a_model(ranks: RankPools, tmp_path: Path) -> None:
    for found in ranks(2).within(CALL_SECONDS, trained, str(tmp_path), "aot_eager"):
        assert max(found) < 1e-5


def fused(here: Here, folder: str) -> list[float]:
    """The same of a few operators around attention, which inductor makes into one kernel before and one behind."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    cp = ContextParallel(schedule=KEEPING)
    torch.manual_seed(0)
    leaves = [torch.randn(1, 16, 2, 16, requires_grad=True) for _ in range(3)]

    def around(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(2 * q.sin(), k, v, cp, tr.Causal()).cos() + 1

    with compiler(), torch._inductor.config.patch(compile_threads=1):
        made = torch.compile(around, fullgraph=True)
        pairs = []
        for call in (made, around):
            out = call(*leaves)
            pairs.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
        assert torch._inductor.metrics.generated_kernel_count > 1
    cp.close()
    return [relative_error(a, b) for a, b in zip(*pairs, strict=True)]


COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")


@COMPILER
def test_inductor(ranks: RankPools, tmp_path: Path) -> None:
    """In short; a model over two ranks is below."""
    (found,) = ranks(1).within(CALL_SECONDS, fused, str(tmp_path))
    assert max(found) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(300)
@COMPILER
@pytest.mark.skipif(not os.environ.get("TOKENRING_FULL_GRID"), reason="takes half a minute: TOKENRING_FULL_GRID=1")
def test_a_model_with_inductor(ranks: RankPools, tmp_path: Path) -> None:
    for found in ranks(2).within(280.0, trained, str(tmp_path), "inductor"):
        assert max(found) < 1e-5
