"""Every family on real processes: exact in both passes over all pairs of circumstances, and bytes as predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import LIMITS, NAMES, Case, Local, check_bytes, check_exact, run, run_on
from families import Point, length_of, points, sample
from oracle import relative_error
from ranks import Here, RankPools
from test_exactness import bf16_limits

from tokenring.schedule.families import FAMILIES, arranged, parse
from tokenring.schedule.families.basic import direct_kv, direct_q
from tokenring.schedule.scheme import Scheme, build

CHUNKS = {"contiguous": 1, "zigzag": 2, "striped": 1}
FACTORS = {
    "layout": tuple(CHUNKS),
    "mask": ("full", "causal", "window to both sides", "documents", "causal & window & documents", "full, longer kv"),
    "pieces": (None, None, 2),
    "batch": (1, 2),
    "head_dim": (40, 64),
    "dtype": (torch.float32, torch.bfloat16),
}
LEAST_TOKENS = 12  # of a chunk


def case_of(point: Point, layout: str, mask: str, pieces: int | None, *rest: object) -> Case:
    pieces = None if pieces is None else pieces * parse(point.name).family.least_pieces
    length = length_of(point, CHUNKS[layout], pieces, LEAST_TOKENS)
    batch, head_dim, dtype = rest
    return Case(
        point.ranks, point.name, layout, mask, *point.heads, batch, head_dim, dtype, pieces,  # type: ignore[arg-type]
        given_length=length, given_kv_length=2 * length if "longer" in mask else length,
    )  # fmt: skip


GRID = [case_of(*row) for row in sample(points(range(2, 9)), FACTORS)]


@pytest.mark.sampled(34)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_exact(case: Case, ranks: RankPools) -> None:
    """fp32 within fp32's limits of float64; bf16 no worse than one process."""
    made, wanted = run_on(ranks, case), case.reference()
    limits = LIMITS if case.dtype == torch.float32 else bf16_limits(case, wanted)
    errors = {name: relative_error(getattr(made, name), getattr(wanted, name)) for name in NAMES}
    assert not {name: (error, limits[name]) for name, error in errors.items() if not error <= limits[name]}


def test_the_grid_has_every_family() -> None:
    assert {parse(case.schedule).family.name for case in GRID} == set(FAMILIES)


ORDER = (0, 2, 1, 3)
SCHEMES = {
    "direct KV, a tile for each peer": direct_kv(2),
    "direct Q, a tile for each peer": direct_q(2),
    "Ulysses, only kv kept": replace(parse("ulysses").make(4), keep=frozenset({"kv"})),
    **{f"{name}, arranged": arranged(parse(name).make(4), ORDER) for name in ("double-ring/2", "relay-q/2", "usp/2")},
}
CASE = Case(4, "ring", "zigzag", "causal & documents", 4, 2, 2, 40, torch.float32, None, given_length=128)


def run_scheme(here: Here, name: str) -> Local:
    return run(here, CASE, SCHEMES[name])


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_that_no_name_says(ranks: RankPools, name: str) -> None:
    parts = ranks(4)(run_scheme, name)
    check_exact(CASE.whole(parts), CASE.reference())
    scheme: Scheme = SCHEMES[name]
    check_bytes(CASE, build(scheme, CASE.layout_of(128), CASE.layout_of(128), CASE.mask), parts)
