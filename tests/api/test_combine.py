"""What engines need of the exchange alone: heads gathered, partial results combined, lengths of shards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import Here, RankPools

import tokenring as tr

BATCH, HEADS, DIM = 3, 6, 8


def partials(world: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """out [P, B, H, D], lse [P, B, H]; some rows saw nothing at some ranks, one at none."""
    generator = torch.Generator().manual_seed(world)
    out = torch.randn(world, BATCH, HEADS, DIM, generator=generator).to(dtype)
    lse = 5 * torch.randn(world, BATCH, HEADS, generator=generator)
    lse[0, 0] = lse[:, 1, 2] = -math.inf
    return out, lse


def wanted(world: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = (x.double() for x in partials(world, dtype))
    total = torch.logsumexp(lse, 0)
    weights = (lse - total.masked_fill(total == -math.inf, 0.0)).exp()[..., None]
    return (weights * out).sum(0), total


def run_combine(here: Here, home: str, dtype: torch.dtype, base_e: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    cp = here.cp(transport=here.transport("shm"))
    out, lse = (x[here.rank] for x in partials(here.world_size, dtype))
    out = out.masked_fill((lse == -math.inf)[..., None], math.nan)  # whatever lies there
    lse = lse.masked_fill(lse == -math.inf, (-math.inf, math.inf, math.nan)[here.rank])
    given = lse if base_e else lse / math.log(2.0)
    assert cp.transport is not None
    tr.combine(out, given, cp, home)  # type: ignore[call-overload]
    before = sum(cp.transport.sent_bytes.values())
    made, total = tr.combine(out, given, cp, home, return_lse=True, is_lse_base_on_e=base_e)  # type: ignore[call-overload]
    return made, total if base_e else total * math.log(2.0), sum(cp.transport.sent_bytes.values()) - before


@pytest.mark.parametrize("home", ["heads", "all"])
@pytest.mark.parametrize("ranks_", [2, 3])
@pytest.mark.parametrize(("dtype", "base_e"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
def test_partial_results_are_combined(
    home: str, ranks_: int, dtype: torch.dtype, base_e: bool, ranks: RankPools
) -> None:
    out, lse = wanted(ranks_, dtype)
    part = HEADS // ranks_ if home == "heads" else HEADS
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    for rank, (made, total, sent) in enumerate(ranks(ranks_)(run_combine, home, dtype, base_e)):
        own = slice(rank * part, (rank + 1) * part) if home == "heads" else slice(None)
        assert made.dtype == dtype
        torch.testing.assert_close(made.double(), out[:, own], atol=limit, rtol=limit)
        torch.testing.assert_close(total.double(), lse[:, own], atol=1e-5, rtol=1e-5)
        assert sent == (ranks_ - 1) * BATCH * part * (DIM * dtype.itemsize + 4)


def run_gather(here: Here) -> torch.Tensor:
    cp = here.cp(transport=here.transport("gloo"))
    whole = torch.arange(BATCH * HEADS * DIM).view(BATCH, HEADS, DIM).float()
    size = HEADS // here.world_size
    return tr.gather_queries(whole[:, here.rank * size : (here.rank + 1) * size], cp) - whole


@pytest.mark.parametrize("ranks_", [2, 3])
def test_heads_are_gathered(ranks_: int, ranks: RankPools) -> None:
    assert not any(found.any() for found in ranks(ranks_)(run_gather))


def run_refused(here: Here, what: str) -> str:
    cp = here.cp(transport=here.transport("shm"))
    try:
        heads = 5 if what == "heads" else HEADS
        batch = 2 + here.rank if what == "sizes" else 2
        tr.combine(torch.zeros(batch, heads, 4), torch.zeros(batch, heads), cp)
    except tr.ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"), [("heads", "5 heads do not divide over 2 ranks"), ("sizes", "batch: rank 0: 2; rank 1: 3")]
)
def test_what_is_refused_on_all_ranks(what: str, said: str, ranks: RankPools) -> None:
    for text in ranks(2)(run_refused, what):
        assert said in text


def test_one_rank_and_wrong_shapes() -> None:
    cp = tr.ContextParallel("self")
    out, lse = partials(1)
    assert torch.equal(tr.combine(out[0], lse[0], cp)[2], out[0, 2])
    assert torch.equal(tr.gather_queries(out[0], cp), out[0])
    refused: list[tuple[Any, ...]] = [(out, lse, cp), (out[0], lse[0].double(), cp), (out[0], lse[0], cp, "tokens")]
    for given in refused:
        with pytest.raises(tr.ConfigurationError):
            tr.combine(*given)
    with pytest.raises(tr.ConfigurationError, match="B, H/P, D"):
        tr.gather_queries(out, cp)
    with pytest.raises(tr.ConfigurationError, match="interleave=0"):
        tr.local_lengths(torch.tensor([3]), cp, 0)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 4, 64])
def test_lengths_are_those_of_tokens_dealt_in_turn(world: int, interleave: int) -> None:
    class Rank(tr.ContextParallel):
        pass

    cp = Rank("self")
    cp.world_size = world
    lengths = torch.tensor([0, 1, world - 1, world, 63, 64, 65, 777, 8192])
    for rank in range(world):
        dealt = [sum(place // interleave % world == rank for place in range(int(n))) for n in lengths]
        assert tr.local_lengths(lengths, cp, interleave, rank).tolist() == dealt
