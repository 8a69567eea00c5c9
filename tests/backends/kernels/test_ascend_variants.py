"""Whole calls on emulated NPUs with a gradient of lse, on some ranks or all, and with sinks and soft-capping."""

from __future__ import annotations

import pytest
import torch
from ascend.device import host_waits
from ascend.operators import register
from ascend.ranks import NpuPools
from oracle import allowed, relative_error, variant64
from ranks import Here
from test_ascend_runs import DOCUMENTS, context

from tokenring import Causal, attention

LIMIT = 5e-6


def runs(here: Here, schedule: str, of_lse: tuple[int, ...], softcap: float) -> tuple[dict[str, float], torch.Tensor]:
    """The largest errors of this rank's rows, and its part of the gradient of the sinks beside the whole one."""
    register("2.13.0")
    cp, mask = context(here, schedule=schedule, layout="zigzag"), DOCUMENTS & Causal()
    random = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, 48, heads, 16, generator=random) for heads in (4, 2, 2, 4)]
    dlse, sinks = 1 + torch.randn(1, 4, 48, generator=random), torch.randn(4, generator=random)
    rows = torch.tensor(cp.layout_for(48).positions(here.rank))
    q, k, v, dout = (x[:, rows].to("npu").requires_grad_(index < 3) for index, x in enumerate(whole))
    given = sinks.to("npu").requires_grad_()
    host_waits.clear()
    out, lse = attention(q, k, v, cp, mask, return_lse=True, sinks=given, softcap=softcap)
    made, wanted = [out], [dout]
    if here.rank in of_lse:
        made, wanted = [lse], [dlse[:, :, rows].to("npu")]  # of these rows nothing uses out
    dq, dk, dv, dsinks = torch.autograd.grad(made, (q, k, v, given), wanted)
    for rank in range(here.world_size):
        positions = torch.tensor(cp.layout_for(48).positions(rank))
        (whole[3] if rank in of_lse else dlse.transpose(1, 2))[:, positions] = 0
    visible = allowed(mask, 48, 48)
    right, all_sinks = variant64(whole[0], whole[1], whole[2], whole[3], dlse, visible, None, sinks, softcap)
    results = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    errors = {name: relative_error(x.cpu(), getattr(right, name)[:, rows]) for name, x in results.items()}
    assert all_sinks is not None
    return errors, torch.stack([dsinks.cpu().double(), all_sinks])


@pytest.mark.parametrize(
    ("schedule", "of_lse", "softcap"),
    [("tokenring", (1,), 0.0), ("ulysses", (0,), 0.0), ("direct-q", (0, 1), 0.0), ("ring", (1,), 2.0)],
)
def test_exact(npus: NpuPools, schedule: str, of_lse: tuple[int, ...], softcap: float) -> None:
    found = npus(2)(runs, schedule, of_lse, softcap)
    for errors, _ in found:
        assert max(errors.values()) < LIMIT, errors
    parts = torch.stack([each for _, each in found])
    assert relative_error(parts[:, 0].sum(dim=0), parts[0, 1]) < LIMIT
