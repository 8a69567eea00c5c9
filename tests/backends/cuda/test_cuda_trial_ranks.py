"""Whole calls of several ranks, on some of which a kernel computes something else than attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_ops.aten import calls, operators
from cuda_ops.broken import BREAKS
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools
from test_cuda_trial import for_tests

from tokenring import Causal, attention
from tokenring.backends import registry
from tokenring.errors import ConfigurationError, UnsupportedError

LENGTH, HALF = 256, torch.bfloat16


def attends(here: Here, kernel: str, broken_ranks: tuple[int, ...], name: str, folder: str) -> tuple[str, float]:
    """What attention raises, by its type, or its error beside float64 with the operators that were used."""
    with pytest.MonkeyPatch.context() as patched, operators(**BREAKS[name][0] if here.rank in broken_ranks else {}):
        for_tests(patched, Path(folder) / str(here.rank))
        whole = [torch.randn(1, LENGTH, heads, 40, generator=torch.Generator().manual_seed(heads)).to(HALF)
                 for heads in (4, 2, 2)]  # fmt: skip
        with here.cp(kernel=kernel, schedule="ring", layout="contiguous") as cp:
            rows = torch.tensor(cp.layout_for(LENGTH).positions(here.rank))
            q, k, v = (x[:, rows].requires_grad_() for x in whole)
            calls.clear()
            try:
                out = attention(q, k, v, cp=cp, mask=Causal())
                torch.autograd.backward(out, torch.ones_like(out))
            except (UnsupportedError, ConfigurationError) as error:
                return f"{type(error).__name__}: {error}", 0.0
            finally:
                registry._choosing.cache_clear()
        given = [x.detach() for x in whole]
        right = attention64(
            given[0], given[1], given[2], torch.ones_like(whole[0]), allowed(Causal(), LENGTH, LENGTH), 40**-0.5
        )  # fmt: skip
        assert q.grad is not None
        worst = max(relative_error(q.grad, right.dq[:, rows]), relative_error(out.detach(), right.out[:, rows]))
        passed = [each for each, how in calls if how.get("rows") not in (70, 35)]  # of the irregular trial
        return passed[-1], worst


@pytest.mark.parametrize("broken_ranks", [(), (0, 1), (1,)], ids=["none", "all", "one"])
@pytest.mark.parametrize("name", ["base 2", "own lse"])
def test_auto_over_ranks(ranks: RankPools, tmp_path: Path, name: str, broken_ranks: tuple[int, ...]) -> None:
    """Each rank takes what is right on its device: nobody waits, and the result is exact."""
    found = ranks(2)(attends, "auto", broken_ranks, name, str(tmp_path))
    for rank, (last, worst) in enumerate(found):
        assert worst < 8e-3, (rank, last)
        if name == "own lse":
            assert last == ("flash backward" if rank in broken_ranks else "cudnn backward")


@pytest.mark.parametrize("name", ["base 2", "own lse"])
def test_a_kernel_by_name_that_is_wrong_everywhere(ranks: RankPools, tmp_path: Path, name: str) -> None:
    _, direction, says = BREAKS[name]
    for said, _ in ranks(2)(attends, "torch-cudnn", (0, 1), name, str(tmp_path)):
        assert said.startswith(
            "UnsupportedError: kernel 'torch-cudnn' cannot compute this call: tried on a causal tile"
        )
        assert says in said and direction in said and "choose another, as in ContextParallel(kernel=" in said


@pytest.mark.parametrize("name", ["base 2", "own lse"])
def test_a_kernel_by_name_that_is_wrong_on_one_rank(ranks: RankPools, tmp_path: Path, name: str) -> None:
    """All ranks hear of it before any waits for another."""
    found = [said for said, _ in ranks(2)(attends, "torch-cudnn", (1,), name, str(tmp_path))]
    assert found[0] == found[1]
    assert "Disagreement: the ranks disagree" in found[0] and BREAKS[name][2] in found[0]
    assert "rank 0: computes it" in found[0] and "rank 1: kernel 'torch-cudnn' cannot compute this" in found[0]


def test_a_kernel_by_name_that_is_right(ranks: RankPools, tmp_path: Path) -> None:
    for last, worst in ranks(2)(attends, "torch-cudnn", (), "own lse", str(tmp_path)):
        assert last == "cudnn backward" and worst < 8e-3


@pytest.mark.parametrize("broken_ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_a_device_without_memory_is_a_refusal_that_all_hear(
    ranks: RankPools, tmp_path: Path, broken_ranks: tuple[int, ...]
) -> None:
    found = [said for said, _ in ranks(2)(attends, "torch-cudnn", broken_ranks, "no memory", str(tmp_path))]
    assert all("it could not be tried: CUDA out of memory" in said for said in found)
