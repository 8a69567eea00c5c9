"""A torch-native model's tokens lie as the mask of its parallel style cuts them, pack after pack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gradient_errors import finite
from ranks import Here, RankPools
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tokenring as tr
from tokenring.integrations.torch_parallel_style import ContextParallelAttention


def error_of_packs(here: Here) -> float:
    """The largest error of calls with is_causal on packs whose masks do not say that they are causal.

    The layout of the first pack with Causal() is that of the second without it.
    """
    cp, length, errors = here.cp(layout="auto"), 256, []
    style, module = ContextParallelAttention(cp), nn.Module()
    module.forward = F.scaled_dot_product_attention
    style._apply(module, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    packs = (0, 128, 256), (0, 128, 192, 256), (0, 128, 256)
    x = torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(5))
    for ends in packs:
        style.mask = tr.Documents(ends)
        part = tr.shard(x, cp, dim=2, mask=style.mask).requires_grad_()
        tr.shard(x, cp, dim=2, mask=tr.Causal() & style.mask)  # given out as well
        found = module(part, part, part, is_causal=True)
        (grad,) = torch.autograd.grad(found.square().sum(), part)
        whole = x.double().requires_grad_()
        of = torch.tensor(ends)[1:].le(torch.arange(length)[:, None]).sum(1)
        seen = (of[:, None] == of) & torch.ones(length, length).tril().bool()
        wanted = F.scaled_dot_product_attention(whole, whole, whole, seen)
        (gradient,) = torch.autograd.grad(wanted.square().sum(), whole)
        for one, all_ in ((found, wanted), (grad, gradient)):
            want = tr.shard(all_.detach(), cp, dim=2, mask=style.mask)
            errors.append(finite((one.detach() - want).norm() / want.norm()))
    return max(errors)


def test_tokens_lie_as_the_mask_of_the_style_cuts_them(ranks: RankPools) -> None:
    assert max(ranks(2)(error_of_packs)) < 1e-5


def sent(here: Here) -> tuple[int, int, bool]:
    """Bytes that a rank sends forward, with gradients and without, and whether both give the same."""
    cp = here.cp(schedule="ulysses")
    style, module, nbytes, made = ContextParallelAttention(cp, tr.Causal()), nn.Module(), [], []
    module.forward = F.scaled_dot_product_attention
    style._apply(module, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    x = torch.randn(1, 4, 24, 8, generator=torch.Generator().manual_seed(5), requires_grad=True)
    assert cp.transport is not None
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            cp.transport.sent_bytes.clear()
            q = x * 2  # a result, as in a model: without gradients where there are none
            made.append(module(q, q, q, is_causal=True))
            nbytes.append(sum(cp.transport.sent_bytes.values()))
    return nbytes[0], nbytes[1], torch.equal(*made)


def test_results_go_home_without_their_lse_where_nothing_is_trained(ranks: RankPools) -> None:
    """Four bytes less of each row and head that another rank has computed."""
    for trained, plain, same in ranks(2)(sent):
        assert same and trained - plain == 4 * 24 * 2
