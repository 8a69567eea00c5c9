"""Ranks compute exactly with the rows that came: what did not come is NaN, and is never read."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from cases import Case, Local, check_bytes, check_exact, run
from pairwise import sample
from ranks import Here, RankPools
from sampling import FULL_GRID

from tokenring import Causal, Documents, Mask, SlidingWindow

FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 3, 4),
    "schedule": (
        "ring", "tokenring", "direct-kv", "direct-q", "bidirectional", "mesh-kv", "mesh-q", "reduced", "ring/keep"
    ),
    "layout": ("contiguous", "zigzag", "striped", "zigzag/2"),
    "mask": ("window", "both sides", "documents", "causal documents", "window of documents"),
    "transport": ("gloo", "shm"),
}  # fmt: skip
LENGTH = 384
DOCUMENTS = Documents([0, 50, 170, 171, 290, 370])  # and padding
MASKS: dict[str, Mask] = {
    "window": SlidingWindow(20),
    "both sides": SlidingWindow(30, 40),
    "documents": DOCUMENTS,
    "causal documents": Causal() & DOCUMENTS,
    "window of documents": SlidingWindow(30, 40) & DOCUMENTS,
}
ROWS = sample(FACTORS, 120 if FULL_GRID else 0, tuple(FACTORS))
SAMPLE = ROWS if FULL_GRID else ROWS[::3]


class ChosenTransport(Case):
    """A case that says itself over which transport it goes."""

    @property
    def transport(self) -> str:
        return self.mask_name.split(" over ")[1]


def poisoned(here: Here, case: Case) -> Local:
    """The case with all memory that torch gives filled with NaN first."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all() and torch.empty(2, dtype=torch.uint8).view(torch.bfloat16).isnan().all()
    try:
        return run(here, case, None)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("count", "schedule", "layout", "mask", "transport"), SAMPLE)
def test_exact_in_poisoned_memory(
    count: int, schedule: str, layout: str, mask: str, transport: str, ranks: RankPools
) -> None:
    family, _, option = schedule.partition("/")
    name = family + ({"mesh-kv": f"/{count}x1", "mesh-q": f"/{count}x1", "reduced": f"/{count}"}.get(family, ""))
    seed = zlib.crc32(f"{schedule} {layout} {mask}".encode()) % 1000
    case = ChosenTransport(
        count, name + (f"/{option}" if option else ""), layout, f"{mask} over {transport}", 4, 2, 2, 16,
        torch.float32, 2 if family == "bidirectional" else None, MASKS[mask], LENGTH, LENGTH, seed,
    )  # fmt: skip
    parts = ranks(count)(poisoned, case)
    made = case.make_schedule()
    check_bytes(case, made, parts)
    check_exact(case.whole(parts), case.reference())
