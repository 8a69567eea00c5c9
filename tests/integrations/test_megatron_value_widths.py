"""Variants of attention in Megatron: values narrower than keys reach other ranks as they are; scores are capped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore.stand_ins import config, layer, params
from oracle import allowed, relative_error, variant64
from ranks import Here, RankPools

from tokenring import Causal
from tokenring.sequence.layout import zigzag

EXACT = {"out": 2e-6, "dq": 5e-6, "dk": 5e-6, "dv": 5e-6}
TOKENS, HEADS, WIDE, NARROW = 64, 4, 192, 128
DOCUMENTS = [40, 24]  # of a pack


def inputs() -> list[torch.Tensor]:
    """q, k, v and dout [s, b, h, d] of the whole sequence."""
    made = torch.Generator().manual_seed(5)
    return [torch.randn(TOKENS, 1, HEADS, dim, generator=made) for dim in (WIDE, WIDE, NARROW, NARROW)]


def held(rank: int, ranks: int, packed: bool) -> torch.Tensor:
    """The positions of this rank's tokens: zigzag, of each document by itself where there are some."""
    rows, start = [], 0
    for length in DOCUMENTS if packed else [TOKENS]:
        rows += [start + position for position in zigzag(ranks, length).positions(rank)]
        start += length
    return torch.tensor(rows)


def mla_layer(here: Here, schedule: str, packed: bool, cap: float | None) -> tuple[list[torch.Tensor], int]:
    """Out and gradients of the rank's tokens, and the bytes that it sent forward."""
    made: Any = layer(
        config(context_parallel_size=here.world_size, attn_logit_softcapping=cap),
        pg_collection=SimpleNamespace(cp=dist.group.WORLD),
        schedule=schedule, k_channels=WIDE, v_channels=NARROW,
    )  # fmt: skip
    rows = held(here.rank, here.world_size, packed)
    q, k, v, dout = (x[rows].squeeze(1) if packed else x[rows] for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    transport = made._contexts.context(schedule).transport
    transport.sent_bytes.clear()
    out = made(q, k, v, None, packed_seq_params=params(DOCUMENTS) if packed else None)
    sent = sum(transport.sent_bytes.values())
    found = [out.detach().unflatten(-1, (HEADS, NARROW)), *torch.autograd.grad(out, leaves, dout.flatten(-2))]
    return [x.view(len(rows), 1, HEADS, -1) for x in found], sent


@pytest.mark.parametrize(
    ("schedule", "packed", "cap"),
    [("ring", False, None), ("ring", True, 0.5), ("ulysses", False, 0.5), ("ulysses", True, None)],
)
def test_exact_and_without_padding(ranks: RankPools, schedule: str, packed: bool, cap: float | None) -> None:
    parts = ranks(2)(mla_layer, schedule, packed, cap)
    order = torch.cat([held(rank, 2, packed) for rank in range(2)])
    q, k, v, dout = (x.transpose(0, 1) for x in inputs())
    visible = allowed(Causal(), TOKENS, TOKENS)
    if packed:
        ends = torch.repeat_interleave(torch.arange(2), torch.tensor(DOCUMENTS))
        visible = visible & (ends[:, None] == ends[None, :])
    wanted, _ = variant64(q, k, v, dout, None, visible, softcap=cap or 0.0)
    for index, (name, limit) in enumerate(EXACT.items()):
        got = torch.cat([made[index] for made, _ in parts])
        assert relative_error(got.transpose(0, 1), getattr(wanted, name)[:, order]) <= limit, name
    if schedule == "ring":  # keys and values go to the other rank, once; it sees nothing of the last of four chunks
        # A move has one run of rows: of a pack all from the first that is needed to the last, in the second document.
        rows = DOCUMENTS[0] // 2 + DOCUMENTS[1] // 4 if packed else TOKENS // 4
        assert [sent for _, sent in parts] == [n * HEADS * (WIDE + NARROW) * 4 for n in (rows, TOKENS // 2)]
    else:  # half of the heads of q, k, v; and of out, in fp32 with its lse
        half = TOKENS // 2 * HEADS // 2
        assert [sent for _, sent in parts] == [half * 4 * (2 * WIDE + 2 * NARROW + 1)] * 2
