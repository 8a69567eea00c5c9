"""vLLM's own functions of decode context parallelism against ours. Needs VLLM_SRC, a checkout or an unpacked wheel of
vLLM: its functions are taken out of their files, as importing those wants the whole of it. Without it the tests skip.
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Here, RankPools

import tokenring as tr

SOURCE = os.environ.get("VLLM_SRC", "")
FOLDERS = ("vllm/v1/attention/ops", "vllm/v1/attention/backends")
pytestmark = pytest.mark.skipif(not SOURCE, reason="VLLM_SRC does not name a checkout of vLLM")
BATCH, HEADS, DIM = 5, 6, 16


def function_of_vllm(name: str) -> Callable[..., Any]:
    """A function of vLLM that needs torch alone."""
    for path in sorted(each for folder in FOLDERS for each in Path(SOURCE, folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                found: dict[str, Any] = {"torch": torch}
                alone = ast.Module([ast.parse("from __future__ import annotations").body[0], node], [])
                exec(compile(alone, str(path), "exec"), found)
                return found[name]  # type: ignore[no-any-return]
    raise AssertionError(f"no {name} in {', '.join(FOLDERS)} of {SOURCE}")


def partials(world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outs [P, B, H, D] and lses [P, B, H]; some rows saw nothing at some ranks, one at none."""
    generator = torch.Generator().manual_seed(world)
    out = torch.randn(world, BATCH, HEADS, DIM, generator=generator)
    lse = 5 * torch.randn(world, BATCH, HEADS, generator=generator)
    lse[0, 0], lse[-1, 1], lse[:, 2, 3] = -math.inf, math.nan, math.inf
    return out.masked_fill(~lse.isfinite()[..., None], 0.0), lse


def combined(here: Here, base_e: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = (x[here.rank] for x in partials(here.world_size))
    cp = here.cp(transport=here.transport("shm"))
    return tr.combine(out, lse, cp, return_lse=True, is_lse_base_on_e=base_e)


@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_partial_results_are_combined_as_vllm_does(world: int, base_e: bool, ranks: RankPools) -> None:
    out, lse = partials(world)
    theirs = function_of_vllm("_lse_weighted_combine")
    wanted, total = theirs(out.clone(), lse.clone(), return_lse=True, is_lse_base_on_e=base_e)
    part, seen = HEADS // world, ~(~lse.isfinite()).all(0)  # of a row that no rank saw their lse is arbitrary
    for rank, (made, made_lse) in enumerate(ranks(world)(combined, base_e)):
        own = slice(rank * part, (rank + 1) * part)
        torch.testing.assert_close(made, wanted[:, own], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(made_lse[seen[:, own]], total[:, own][seen[:, own]], atol=1e-5, rtol=1e-6)
        assert bool((made_lse[~seen[:, own]] == -math.inf).all())


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave", [1, 4, 64])
def test_lengths_are_those_of_vllm(world: int, interleave: int) -> None:
    theirs = function_of_vllm("get_dcp_local_seq_lens")
    cp = tr.ContextParallel("self")
    cp.world_size = world
    lengths = torch.cat([torch.arange(2 * world * interleave + 2), torch.tensor([777, 8192, 131071])]).int()
    every = theirs(lengths, world, None, interleave)
    for rank in range(world):
        wanted = theirs(lengths, world, rank, interleave)
        found = tr.local_lengths(lengths, cp, interleave, rank)
        assert found.dtype == lengths.dtype and torch.equal(found, wanted.int().view(-1))
        assert torch.equal(found, every[:, rank].int())
