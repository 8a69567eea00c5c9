"""One case of the exactness grid: its sizes, inputs and schedule; how ranks run it and what it is measured by.

Apart from test_exactness.py, because ranks import it, and should not make the grid each.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from oracle import Attention, allowed, attention64, relative_error, whole_sdpa
from ranks import Here, RankPools

from tokenring import (
    Causal,
    ContextParallel,
    Documents,
    Full,
    Layout,
    Mask,
    Schedule,
    Scheme,
    SlidingWindow,
    Workload,
    attention,
    shard,
)
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.backend_names import transport_target
from tokenring.proof import verify
from tokenring.schedule.names import make_schedule, named_schedule
from tokenring.sequence.layout import make_layout

SCHEDULES = ("ring+", "ring-", "tokenring+", "tokenring-", "bidirectional", "direct-kv", "direct-q")
LAYOUTS = ("contiguous", "zigzag", "striped", "zigzag/2", "contiguous/4")
MASKS = (
    "full", "full, longer kv", "full, shorter kv", "causal", "window to the left", "window to both sides",
    "window without end", "documents", "causal & documents", "causal & window & documents", "window & documents",
)  # fmt: skip
LONG = 300  # tokens for few ranks: more rows at each than kernels take of a band in one call
SHORT = 120
NAMES = ("out", "lse", "dq", "dk", "dv")
LIMITS = {"out": 2e-6, "lse": 2e-6, "dq": 5e-6, "dk": 5e-6, "dv": 5e-6}  # of the error of fp32 against float64
Sent = dict[int, int]  # destination → bytes


class Local(NamedTuple):
    """What one rank has: its parts of the results, and the bytes that it sent in each pass."""

    results: Attention
    sent: dict[str, Sent]


@dataclass(frozen=True)
class Case:
    """One point of the grid; lengths, mask and schedule follow from it."""

    ranks: int
    schedule: str
    layout: str
    mask_name: str
    q_heads: int
    kv_heads: int
    batch: int
    head_dim: int
    dtype: torch.dtype
    pieces: int | None
    given_mask: Mask | None = None  # instead of the one called mask_name
    given_length: int | None = None
    given_kv_length: int | None = None
    seed: int | None = None  # of the inputs; None: by the sizes
    value_dim: int | None = None  # of v, out and their gradients; None: head_dim

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        dims = f"{self.head_dim}" if self.value_dim is None else f"{self.head_dim}/{self.value_dim}"
        sizes = f"{self.q_heads}/{self.kv_heads} heads of {dims}, batch {self.batch}, {dtype}"
        pieces = "" if self.pieces is None else f", {self.pieces} pieces"
        return f"{self.ranks} ranks, {self.schedule}, {self.layout}, {self.mask_name}, {sizes}{pieces}"

    @property
    def transport(self) -> str:
        """One or the other, by no rule but always the same for a case."""
        return ("gloo", "shm")[zlib.crc32(str(self).encode()) % 2]

    @property
    def name(self) -> str:
        return self.schedule.rstrip("+-")

    @property
    def direction(self) -> int | None:
        return {"+": 1, "-": -1}.get(self.schedule[-1])

    @property
    def q_length(self) -> int:
        return self.given_length or self._length(LONG if self.ranks <= 2 else SHORT)

    @property
    def kv_length(self) -> int:
        if self.given_kv_length is not None:
            return self.given_kv_length
        factor = {"full, longer kv": 2, "full, shorter kv": 0.5}.get(self.mask_name, 1)
        return self.q_length if factor == 1 else self._length(int(self.q_length * factor))

    def _length(self, wanted: int) -> int:
        """About so long, and in whole chunks and pieces."""
        base, _, cuts = self.layout.partition("/")
        chunks = self.ranks * int(cuts or 1) * (2 if base == "zigzag" else 1)
        least = chunks * (self.pieces or (2 if self.name == "bidirectional" else 1))
        return max(1, round(wanted / least)) * least

    @cached_property
    def mask(self) -> Mask:
        if self.given_mask is not None:
            return self.given_mask
        n = self.q_length
        # One document of one token, others that end inside chunks, and padding at the end.
        documents = Documents([0, n // 7, n // 7 + 1, n // 2 + 1, n - n // 4])
        left, both = SlidingWindow(n // 5), SlidingWindow(n // 7, n // 9)
        return {
            "causal": Causal(),
            "window to the left": left,
            "window to both sides": both,
            "window without end": SlidingWindow(-1, n // 8),
            "documents": documents,
            "causal & documents": Causal() & documents,
            "causal & window & documents": Causal() & both & documents,
            "window & documents": both & documents,
        }.get(self.mask_name, Full())

    def layout_of(self, length: int) -> Layout:
        return make_layout(self.layout, self.ranks, length)

    @property
    def workload(self) -> Workload:
        lengths = (self.q_length, self.kv_length)
        heads = self.q_heads, self.kv_heads, self.head_dim
        return Workload(self.batch, *lengths, *heads, self.dtype, self.value_dim or self.head_dim)

    def make_schedule(self) -> Schedule:
        """With its direction, or as ContextParallel makes it from the name."""
        layouts = (self.layout_of(self.q_length), self.layout_of(self.kv_length))
        if self.direction is None:
            return named_schedule(self.name, self.workload, *layouts, self.mask, self.pieces)
        return make_schedule(self.name, *layouts, self.mask, self.direction, self.pieces)

    @property
    def options(self) -> dict[str, Any]:
        """What a context is given: a name where that says all, as a schedule itself is proved by every rank anew."""
        if self.direction is None:
            return {"layout": self.layout, "schedule": self.name, "pieces": self.pieces}
        return {"layout": self.layout, "schedule": self.make_schedule()}

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v, dout over the whole sequence: the same wherever it is called."""
        random = torch.Generator().manual_seed(self.ranks * 1000 + self.q_length if self.seed is None else self.seed)
        of_q, of_kv = (self.q_length, self.q_heads), (self.kv_length, self.kv_heads)
        of_keys, of_values = self.head_dim, self.value_dim or self.head_dim
        return [
            torch.randn(self.batch, *size, dim, generator=random).to(self.dtype)
            for size, dim in ((of_q, of_keys), (of_kv, of_keys), (of_kv, of_values), (of_q, of_values))
        ]

    def reference(self, scale: float | None = None) -> Attention:
        """In float64."""
        q, k, v, dout = self.inputs()
        return attention64(q, k, v, dout, allowed(self.mask, self.q_length, self.kv_length), scale)

    def one_process(self, scale: float | None = None) -> Attention:
        """torch's flash kernel over the whole sequence, in the case's dtype; values of another width with zeros beside.

        Without these torch takes another kernel, which computes bf16 in fp32 throughout.
        """
        dense = self.mask != Full() and self.mask != Causal()
        visible = allowed(self.mask, self.q_length, self.kv_length) if dense else None
        given, of_keys, of_values = self.inputs(), self.head_dim, self.value_dim or self.head_dim
        if of_values > of_keys and scale is None:  # else it would be that of the wider ones
            scale = 1 / math.sqrt(of_keys)
        widest = max(of_keys, of_values)
        q, k, v, dout = (torch.nn.functional.pad(x, (0, widest - x.shape[-1])) for x in given)
        out, lse, dq, dk, dv = whole_sdpa(q, k, v, dout, visible, self.mask == Causal(), scale)
        return Attention(out[..., :of_values], lse, dq[..., :of_keys], dk[..., :of_keys], dv[..., :of_values])

    def whole(self, parts: list[Local]) -> Attention:
        """The ranks' parts put together in sequence order."""
        joined = []
        for name in NAMES:
            layout = self.layout_of(self.kv_length if name in ("dk", "dv") else self.q_length)
            locals_ = [getattr(part.results, name) for part in parts]
            dim = 2 if name == "lse" else 1
            order = torch.tensor([position for rank in range(self.ranks) for position in layout.positions(rank)])
            joined.append(torch.cat(locals_, dim).index_select(dim, torch.argsort(order)))
        return Attention(*joined)


def run(
    here: Here, case: Case, schedule: Schedule | Scheme | str | None, kernel: str = "auto", scale: float | None = None,
    proved: bool = False,
) -> Local:  # fmt: skip
    """The case on one rank, forward and backward; schedule None: by name. proved: no rank proves it once more."""
    with unproved() if proved else nullcontext():
        return _run(here, case, schedule, kernel, scale)


@contextmanager
def unproved() -> Iterator[None]:
    """Calls take schedules, and their programs for a transport, without a proof."""
    proofs = {name: getattr(verify, name) for name in ("verify", "verify_lowered")}
    for name in proofs:
        setattr(verify, name, lambda *_: None)
    try:
        yield
    finally:
        for name, proof in proofs.items():
            setattr(verify, name, proof)


def _run(here: Here, case: Case, schedule: Schedule | Scheme | str | None, kernel: str, scale: float | None) -> Local:
    pieces = None if schedule else case.pieces  # a schedule says itself what it moves in how many
    transport = here.transport(case.transport)
    cp = here.cp(layout=case.layout, schedule=schedule or case.name, pieces=pieces, kernel=kernel, transport=transport)
    parts = [shard(x, cp) for x in case.inputs()]
    q, k, v, dout = (part.requires_grad_(index < 3) for index, part in enumerate(parts))
    counter: Sent = {} if transport is None else transport.sent_bytes
    counter.clear()
    out, lse = attention(q, k, v, cp, case.mask, scale, return_lse=True)
    sent = {"forward": dict(counter)}
    counter.clear()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    sent["backward"] = dict(counter)
    return Local(Attention(out.detach(), lse.detach(), dq, dk, dv), sent)


def compute(cp: ContextParallel, case: Case) -> Local:
    """The case in a context, both passes; its bytes are not counted."""
    q, k, v, dout = (shard(x, cp).requires_grad_(index < 3) for index, x in enumerate(case.inputs()))
    out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
    return Local(Attention(out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)), {})


def check_bytes(case: Case, schedule: Schedule, parts: list[Local]) -> None:
    """What every rank sent over every link is what the schedule says, in each pass."""
    for direction in PASSES:
        counted = {(src, dst): n for src, part in enumerate(parts) for dst, n in part.sent[direction].items()}
        assert counted == schedule.link_bytes(case.workload, direction), direction


def run_on(ranks: RankPools, case: Case, kernel: str = "auto", scale: float | None = None) -> Attention:
    """The whole result of a case; its bytes are checked on the way. What each rank would prove is proved here, once."""
    schedule = case.make_schedule()
    if case.direction is not None:
        schedule.verify()
    verify.verify_lowered(schedule, transport_target(case.transport))
    parts = ranks(case.ranks)(run, case, None if case.direction is None else schedule, kernel, scale, True)
    check_bytes(case, schedule, parts)
    return case.whole(parts)


def check_exact(made: Attention, wanted: Attention) -> None:
    """fp32 results within the limits of fp32."""
    errors = {name: relative_error(getattr(made, name), getattr(wanted, name)) for name in NAMES}
    assert all(error <= LIMITS[name] for name, error in errors.items()), errors
