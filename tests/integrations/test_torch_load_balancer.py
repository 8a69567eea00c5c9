"""A load balancer for torch's own context parallelism: the tokens of layout "auto", through torch's interface."""

from __future__ import annotations

import pytest
import torch
from ranks import Here, RankPools

import tokenring as tr
from tokenring.integrations.torch_load_balancer import load_balancer

balancers = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
SIZES = (6144, 2048, *[512] * 16)
RANKS = 8


def bounds() -> list[int]:
    return torch.cumsum(torch.tensor([0, *SIZES]), 0).tolist()


def uneven(indices: torch.Tensor) -> float:
    """Pairs of the busiest rank over the mean, of torch's indices [1, length], by the mask's definition."""
    start = torch.zeros(sum(SIZES), dtype=torch.int64)
    for a, b in zip(bounds(), bounds()[1:], strict=False):
        start[a:b] = a
    pairs = indices[0] - start[indices[0]] + 1
    parts = pairs.view(RANKS, -1).sum(1)
    return float(parts.max() / parts.double().mean())


def test_work_is_even_where_torch_leaves_it_uneven() -> None:
    """torch's own balancer for documents: 2.28 (pytorch issue 189902)."""
    theirs = balancers._PerDocumentHeadTailLoadBalancer([list(SIZES)], RANKS, "cpu")
    ours = load_balancer(tr.Causal() & tr.Documents(bounds()), sum(SIZES), RANKS)
    assert isinstance(ours, balancers._LoadBalancer)
    assert uneven(theirs._generate_indices()) > 2.2
    assert uneven(ours._generate_indices()) <= 1.05


def test_indices_and_their_inverse() -> None:
    made = load_balancer("causal", 64, 4)
    order, back = made._generate_indices(), made._generate_indices(restore=True)
    assert order.shape == back.shape == (1, 64)
    assert order[0][back[0]].tolist() == list(range(64))


def shards(here: Here) -> bool:
    """Whether torch's own function gives this rank what tr.shard does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention

    mask, length = tr.Causal() & tr.Documents([0, 30, 400, 1024]), 1024
    balancer, x = load_balancer(mask, length, here.world_size), torch.arange(length)[None, :, None].double()
    mesh = init_device_mesh("cpu", (here.world_size,))
    (theirs,) = _attention._context_parallel_shard(mesh, (x,), (1,), balancer)
    assert isinstance(theirs, torch.Tensor)
    return torch.equal(theirs, tr.shard(x, here.cp(layout="auto"), mask=mask))


def test_torch_shards_by_it(ranks: RankPools) -> None:
    assert ranks(2)(shards) == [True, True]


def test_torch_without_balancers(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, balancers.__name__, None)
    with pytest.raises(tr.TokenRingError, match=r"they came with torch 2\.9"):
        load_balancer("causal", 64, 4)
