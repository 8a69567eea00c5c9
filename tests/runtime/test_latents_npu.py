"""Latents on emulated NPUs over the emulated HCCL, by the vendor's operator: exact, and the bytes of the schedule."""

from __future__ import annotations

import pytest
import torch
from ascend.hccl_ledger import ledger
from ascend.hccl_ranks import kept_transport
from ascend.hccl_watch import watch
from ascend.operators import register
from ascend.ranks import NpuPools
from ascend.schemas import OFFERS
from oracle import relative_error
from ranks import Here
from test_latents import LENGTH, LIMITS, MASKS, NAMES, Case, Made, latent_attention, reference, whole

from tokenring import ContextParallel, shard
from tokenring.schedule.names import named_schedule
from tokenring.sequence.layout import make_layout

Sent = dict[str, dict[int, int]]


def on_npus(here: Here, case: Case, transport: str) -> tuple[Made, Sent]:
    """Both passes on one rank, every operator watched; and the bytes sent in each."""
    if "operators" not in here.memory:
        register(next(iter(OFFERS)))
        here.memory["operators"] = True
    moved = kept_transport(here, transport)
    ledger.in_use.clear()
    ledger.clear()
    cp = ContextParallel(layout=case.layout, schedule=case.schedule, transport=moved, kernel="npu-fusion")
    q, latent, rope, weight, dout = (x.to("npu") for x in case.inputs())
    leaves = [shard(x, cp, dim=1).requires_grad_() for x in (q, latent, rope)] + [weight.requires_grad_()]
    sent: Sent = {}
    with watch():
        moved.sent_bytes.clear()
        out, lse = latent_attention(*leaves, cp, MASKS[case.mask], return_lse=True)
        sent["forward"] = dict(moved.sent_bytes)
        moved.sent_bytes.clear()
        grads = torch.autograd.grad(out, leaves, shard(dout, cp, dim=1))
        sent["backward"] = dict(moved.sent_bytes)
    ledger.check_all_waited()
    cp.close()
    return dict(zip(NAMES, (x.detach().cpu() for x in (out, lse, *grads)), strict=True)), sent


CASES = [
    (Case(2, "ring", "zigzag", "causal"), "hccl/pair"),
    (Case(3, "direct-kv", "striped", "documents"), "hccl/batch"),
    (Case(4, "tokenring", "contiguous", "window"), "hccl/channel"),
    (Case(4, "tiles/2x2", "zigzag", "full"), "hccl"),
    (Case(4, "all-gather-kv", "contiguous", "causal"), "hccl/collectives"),
]


@pytest.mark.parametrize(("case", "transport"), CASES, ids=str)
def test_exact(case: Case, transport: str, npus: NpuPools) -> None:
    found = npus(case.ranks)(on_npus, case, transport)
    made, wanted = whole(case, [part for part, _ in found]), reference(case)
    errors = {name: relative_error(made[name], wanted[name]) for name in NAMES}
    assert all(error <= LIMITS[name] for name, error in errors.items()), errors
    layout = make_layout(case.layout, case.ranks, LENGTH)
    schedule = named_schedule(case.schedule, case.workload, layout, layout, MASKS[case.mask])
    for direction in ("forward", "backward"):
        counted = {(src, dst): n for src, (_, sent) in enumerate(found) for dst, n in sent[direction].items() if n}
        assert counted == schedule.link_bytes(case.workload, direction), direction


def without_what_keys_end_with(here: Here, case: Case, transport: str) -> tuple[Made, Sent]:
    """The same with a kernel that takes what keys end with for 0."""
    from tokenring.runtime.latent_kernel import Expansion

    expanded = Expansion.expanded

    def wrong(self: Expansion, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = expanded(self, latent)
        return torch.cat([k[..., : self.nope], torch.zeros_like(k[..., self.nope :])], -1), v

    Expansion.expanded = wrong  # type: ignore[method-assign]
    try:
        return on_npus(here, case, transport)
    finally:
        Expansion.expanded = expanded  # type: ignore[method-assign]


def test_wrong_keys_are_seen(npus: NpuPools) -> None:
    case, transport = CASES[0]
    made = whole(case, [part for part, _ in npus(case.ranks)(without_what_keys_end_with, case, transport)])
    assert relative_error(made["out"], reference(case)["out"]) > 100 * LIMITS["out"]
