"""Random contexts and random calls in them, the same on every rank that draws from one seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import LAYOUTS, Case

from tokenring import Causal, Documents, Full, Mask, Scheme, SlidingWindow
from tokenring.schedule.names import SCHEMES

BY_NAME = ("ring", "tokenring", "bidirectional", "direct-kv", "direct-q", "auto", "auto:ring,direct-q")
AS_SCHEMES = ("ring+", "ring-", "tokenring+", "tokenring-", "direct-kv fused", "direct-q fused")
PASSES = ("both", "both", "both", "twice", "later", "forward", "no_grad", "inference")
STRIDES = ("packed", "packed", "heads first", "part of more", "transposed", "expanded")
HEADS = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (6, 2), (8, 1), (8, 2), (8, 4), (8, 8))
SCALES = 0.3, 1.5  # times 1/√D: beyond, rows see one column alone, and one more rounding of a bf16 partial shows
LEAST_BF16 = 10000  # elements: of fewer, two errors differ by more than that ratio by chance


@dataclass(frozen=True)
class Context:
    """What a context is made with. `members` are ranks of the world; shared: on a transport that outlives it."""

    members: tuple[int, ...]
    layout: str
    schedule: str
    pieces: int | None
    transport: str
    shared: bool
    kernel: str

    def make_schedule(self) -> str | Scheme:
        if self.schedule in BY_NAME:
            return self.schedule
        name, _, fused = self.schedule.partition(" ")
        options: dict[str, Any] = {"fused": True} if fused else {"direction": 1 if name[-1] == "+" else -1}
        return SCHEMES[name.rstrip("+-")](pieces=self.pieces or 1, **options)


@dataclass(frozen=True)
class Drawn:
    """One call."""

    context: Context
    case: Case
    passes: str
    strides: str
    scale: float | None

    def __str__(self) -> str:
        case = self.case
        sizes = f"{case.q_length} × {case.kv_length} tokens, scale {self.scale}, {self.passes}, {self.strides}"
        return f"{self.context}: {case}, {sizes}, seed {case.seed}"


class Draw:
    """The same on every rank, whatever the rank does with it."""

    def __init__(self, seed: str, world_size: int) -> None:
        self.random = random.Random(seed)
        everyone = tuple(range(world_size))
        some = [(0, 1), (2, 3), (0, 2), (1, 3), (1, 2, 3)] if world_size == 4 else []
        self.members = [everyone] * (2 * len(some) + 1) + some

    def context(self) -> Context:
        one = self.random.choice
        schedule = one(BY_NAME + AS_SCHEMES)
        pieces = None if schedule.startswith("auto") else one((None, None, 2, 4))
        transport = one(("shm", "gloo", "auto"))
        kernel = "reference" if self.random.random() < 0.1 else "auto"
        return Context(one(self.members), one(LAYOUTS), schedule, pieces, transport, self.random.random() < 0.4, kernel)

    def call(self, context: Context) -> Drawn:
        one, uniform = self.random.choice, self.random.uniform
        q_heads, kv_heads = one(HEADS)
        base = Case(
            len(context.members), context.schedule.partition(" ")[0].partition(":")[0], context.layout, "", q_heads,
            kv_heads, one((1, 1, 2, 3)), one((8, 16, 40, 64, 64, 128)), one((torch.float32, torch.bfloat16)),
            context.pieces,
        )  # fmt: skip
        longest = one((100, 200, 200, 300, 700))
        length = base._length(int(longest ** uniform(0.7, 1.0)))
        mask = self.mask(length)
        kv_length = base._length(int(length * uniform(0.3, 2.0))) if mask == Full() and one((True, False)) else length
        case = replace(
            base, mask_name=str(mask), given_mask=mask, given_length=length, given_kv_length=kv_length,
            seed=self.random.randrange(1 << 30),
        )  # fmt: skip
        scale = round(uniform(*SCALES) / math.sqrt(case.head_dim), 3)
        workload = case.workload
        rows = min(workload.q_length * workload.q_heads, workload.kv_length * workload.kv_heads)
        if rows * workload.batch * workload.head_dim < LEAST_BF16:
            case = replace(case, dtype=torch.float32)
        return Drawn(context, case, one(PASSES), one(STRIDES), one((None, None, scale)))

    def mask(self, length: int) -> Mask:
        kind, some = self.random.choice(("full", "causal", "window", "documents", "all")), self.random.randrange
        wide = max(2, length // 3)
        window = SlidingWindow(some(1, wide), some(wide)) if some(3) else SlidingWindow(-1, some(1, wide))
        # The last half at most is padding. Where all rows see one column, gradients are 0 but for rounding.
        end = length if some(2) else some(length // 2, length + 1)
        documents = Documents([0, *sorted(some(1, end) for _ in range(some(1, 6))), end])
        both = documents & self.random.choice((Causal(), window, Causal() & window))
        return {"full": Full(), "causal": Causal(), "window": window, "documents": documents, "all": both}[kind]
