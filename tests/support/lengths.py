"""Cases of any length: how ranks run them, and what they are measured by. Ranks import it, and not the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from oracle import Attention, allowed, attention64
from ranks import Here

from tokenring import (
    Causal,
    Documents,
    Full,
    Layout,
    Mask,
    SlidingWindow,
    Workload,
    attention,
    positions,
    shard,
    unshard,
)
from tokenring.ir.schedule_data import PASSES
from tokenring.schedule.names import named_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout

HEADS, KV_HEADS, HEAD_DIM = 12, 12, 8  # heads that 1 to 4 and 6 ranks share


@dataclass(frozen=True)
class AnyLength:
    """One call of sequences of any length."""

    ranks: int
    layout: str
    schedule: str
    length: int
    kv_length: int
    mask_name: str = "causal"
    transport: str = "gloo"

    @property
    def mask(self) -> Mask:
        """Of one sequence; across two only all is visible."""
        if self.length != self.kv_length:
            return Full()
        n = self.length
        return {
            "full": Full(),
            "causal": Causal(),
            "window": SlidingWindow(n // 3, n // 5),
            "documents": Causal() & Documents([0, n // 3, n // 2, n - n // 7]),
        }[self.mask_name]

    def layouts(self) -> tuple[Layout, Layout]:
        return make_layout(self.layout, self.ranks, self.length), make_layout(self.layout, self.ranks, self.kv_length)

    def make_schedule(self) -> Schedule:
        return named_schedule(self.schedule, self.workload, *self.layouts(), self.mask)

    @property
    def workload(self) -> Workload:
        return Workload(1, self.length, self.kv_length, HEADS, KV_HEADS, HEAD_DIM)

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v, dout over the whole sequence."""
        random = torch.Generator().manual_seed(self.length * 1000 + self.kv_length)
        sizes = ((self.length, HEADS), (self.kv_length, KV_HEADS), (self.kv_length, KV_HEADS), (self.length, HEADS))
        return [torch.randn(1, tokens, heads, HEAD_DIM, generator=random) for tokens, heads in sizes]

    def reference(self) -> Attention:
        """In float64."""
        q, k, v, dout = self.inputs()
        return attention64(q, k, v, dout, allowed(self.mask, self.length, self.kv_length))


class Made(NamedTuple):
    """What one rank has: the whole results, as all ranks have them, the lengths of its parts, and the bytes it sent."""

    results: Attention
    parts: tuple[int, int]
    sent: dict[str, dict[int, int]]


def run_any_length(here: Here, case: AnyLength, by_hand: bool = False) -> Made:
    """Both passes of a case. by_hand: parts are cut without tokenring's help, so that only they say the lengths."""
    transport = here.transport(case.transport)
    cp = here.cp(layout=case.layout, schedule=case.schedule, transport=transport)
    if by_hand:
        own = [layout.positions(here.rank) for layout in case.layouts()]
        parts = [x[:, own[which]] for x, which in zip(case.inputs(), (0, 1, 1, 0), strict=True)]
    else:
        parts = [shard(x, cp) for x in case.inputs()]
        q_layout, _ = case.layouts()
        assert positions(cp, case.length).tolist() == q_layout.positions(here.rank)
    q, k, v, dout = (part.requires_grad_(index < 3) for index, part in enumerate(parts))
    counter: dict[int, int] = {} if transport is None else transport.sent_bytes
    counter.clear()
    out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
    sent = {"forward": dict(counter)}
    counter.clear()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    sent["backward"] = dict(counter)
    whole = [unshard(x.detach(), cp, dim) for x, dim in ((out, 1), (lse, 2), *((grad, 1) for grad in grads))]
    return Made(Attention(*whole), (q.shape[1], k.shape[1]), sent)


def check_sent(case: AnyLength, made: list[Made]) -> None:
    """What every rank sent is what the schedule says: rows that there are, and no padding."""
    schedule = case.make_schedule()
    for direction in PASSES:
        counted = {(src, dst): n for src, part in enumerate(made) for dst, n in part.sent[direction].items() if n}
        assert counted == schedule.link_bytes(case.workload, direction), direction
