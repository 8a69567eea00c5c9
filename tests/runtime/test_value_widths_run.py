"""Values of another width than keys, on ranks: exact in every family, and not a byte of padding on any wire.

A seeded sample of the grid; TOKENRING_FULL_GRID=1 runs all of it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import LIMITS, NAMES, Case, Local, check_bytes, compute, run_on
from families import members
from oracle import relative_error
from ranks import Here, RankPools
from sampling import FULL_GRID
from test_exactness import bf16_limits

from tokenring import ConfigurationError, attention
from tokenring.lowering.footprint import flops, program_bytes
from tokenring.lowering.lower import lower
from tokenring.lowering.records import Records
from tokenring.sequence.workload import Workload

MLA, TINY, WIDER = (192, 128), (24, 16), (16, 40)
FAMILIES = ("ring", "direct-kv", "direct-q", "tokenring", "tiles", "ulysses", "usp", "all-gather-kv")
HEADS = ((4, 4), (8, 2))  # as multi-latent attention has them, and grouped
MASKS = ("full", "causal", "window to both sides", "causal & documents", "full, longer kv")


def grid(family: str) -> list[Case]:
    """All cases of a family on 1 to 4 ranks that its heads divide."""
    found = [(1, heads, family) for heads in HEADS if family == "ring"]
    for ranks, heads in product((2, 3, 4), HEADS):
        found += [(ranks, heads, name) for name in members(ranks, heads) if name.partition("/")[0] == family]
    return [
        Case(
            ranks, name, layout, mask, *heads, 1, widths[0], dtype, None, value_dim=widths[1],
            given_length=48, given_kv_length=96 if "longer" in mask else 48,
        )
        for (ranks, heads, name), layout, mask, widths, dtype in product(
            found, ("zigzag", "contiguous", "striped"), MASKS, (MLA, TINY, WIDER), (torch.float32, torch.bfloat16)
        )
    ]  # fmt: skip


def some(family: str) -> list[Case]:
    """A few: of each width in fp32, and one in bf16."""
    chosen, found = random.Random(family), grid(family)
    wanted = [(each, torch.float32) for each in (MLA, TINY, WIDER)] + [(MLA, torch.bfloat16)]
    return [
        chosen.choice([case for case in found if (case.head_dim, case.dtype) == (widths[0], dtype)])
        for widths, dtype in wanted
    ]


CASES = [case for each in FAMILIES for case in (grid if FULL_GRID else some)(each)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case, ranks: RankPools) -> None:
    """Against float64, or no worse than torch in one process; bytes on every link as the schedule says."""
    made, wanted = run_on(ranks, case), case.reference()
    assert made.out.shape == (1, 48, case.q_heads, case.value_dim) == made.out.shape
    limits = LIMITS if case.dtype == torch.float32 else bf16_limits(case, wanted)
    errors = {name: relative_error(getattr(made, name), getattr(wanted, name)) for name in NAMES}
    assert not {name: (error, limits[name]) for name, error in errors.items() if not error <= limits[name]}


def test_the_sample_has_every_number_of_ranks() -> None:
    assert {case.ranks for case in CASES} == {1, 2, 3, 4}


# ---------- bytes

RING = Case(4, "ring", "contiguous", "full", 8, 4, 1, 192, torch.bfloat16, None, value_dim=128, given_length=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_sends_192_and_128_of_each_token_and_kv_head(ranks: RankPools, dtype: torch.dtype) -> None:
    """Counted at the transport: forward k and v, backward k and v and their gradients, in fp32 where they add up."""
    case = replace(RING, dtype=dtype)
    tokens, token = 64 // 4, 4 * (192 + 128)  # elements of a token
    parts = ranks(4)(sends, case)
    for src, part in enumerate(parts):
        assert part.sent["forward"] == {(src + 1) % 4: 3 * tokens * token * dtype.itemsize}
    check_bytes(case, case.make_schedule(), parts)


def sends(here: Here, case: Case) -> Local:
    from cases import run

    return run(here, case, None)


def test_records_are_as_wide_as_their_tensors() -> None:
    size, schedule = RING.workload, RING.make_schedule()
    of = {direction: Records(schedule, size, direction) for direction in ("forward", "backward")}
    two, statistics = 2, 2 * 4
    q, kv = 8 * 1, 4 * 1  # heads, of one batch entry
    assert of["forward"]("q").nbytes == two * q * 192
    assert of["forward"]("kv").nbytes == two * kv * (192 + 128)
    assert of["forward"]("q_partial").nbytes == two * q * 128 + q * 4
    assert of["backward"]("q").nbytes == two * q * (192 + 128) + q * statistics
    assert of["backward"]("kv").nbytes == two * kv * (192 + 128)
    assert of["backward"]("q_partial").nbytes == two * q * 192
    assert of["backward"]("kv_partial").nbytes == two * kv * (192 + 128)
    dims = {each.name: each.dim for each in of["backward"]("q").fields}
    assert dims == {"lse": 0, "delta": 0, "q": 192, "dout": 128}


def test_buffers_and_flops_are_smaller_than_of_padded_values() -> None:
    schedule, size = RING.make_schedule(), RING.workload
    padded = replace(size, value_dim=192)
    for direction in ("forward", "backward"):
        pools = [program_bytes(schedule, each, lower(schedule, 0, direction, each)) for each in (size, padded)]
        assert pools[0] < pools[1]
    pairs = 64 * 64 // 4 * 8  # of a rank, in all heads
    assert set(flops(schedule, size, "forward").values()) == {pairs * 2 * (192 + 128)}
    assert set(flops(schedule, size, "backward").values()) == {pairs * (6 * 192 + 4 * 128)}


# ---------- what ranks agree on


def differs(here: Here) -> str:
    """The last rank's values are wider; and then all make one call."""
    cp = here.cp(layout="contiguous", schedule="ring")
    q, k = torch.ones(1, 8, 4, 24), torch.ones(1, 8, 2, 24)
    v = torch.ones(1, 8, 2, 32 if here.rank == here.world_size - 1 else 16)
    try:
        attention(q, k, v, cp)
    except ConfigurationError as error:
        assert attention(q, k, k[..., :16], cp).shape == (1, 8, 4, 16)
        return str(error)
    return "nothing was refused"


def test_ranks_whose_values_are_of_other_widths_all_hear_it(ranks: RankPools) -> None:
    (said, *others) = ranks(3)(differs)
    assert said.startswith("the ranks disagree, so the call was not made. value_dim: ranks 0, 1: 16; rank 2: 32")
    assert others == [said, said]


def wrong_heads(here: Here) -> str:
    """One rank's values have other heads than its keys."""
    cp = here.cp(layout="contiguous", schedule="ring")
    q, k = torch.ones(1, 8, 4, 24), torch.ones(1, 8, 2, 24)
    try:
        attention(q, k, torch.ones(1, 8, 2 - here.rank, 16), cp)
    except ConfigurationError as error:
        return str(error)
    return "nothing was refused"


def test_values_of_other_heads_are_refused_on_all_ranks(ranks: RankPools) -> None:
    theirs, own = ranks(2)(wrong_heads)
    assert own.startswith("k and v must have one shape but for their head dimensions")
    assert theirs.startswith("rank 1 refused: k and v must have one shape but for their head dimensions")


def chosen(here: Here, case: Case) -> Local:
    return compute(here.cp(layout=case.layout, schedule="auto"), case)


def test_the_planner_takes_them(ranks: RankPools) -> None:
    case = replace(RING, ranks=3, dtype=torch.float32, layout="zigzag", mask_name="causal", given_length=48)
    made, wanted = case.whole(ranks(3)(chosen, case)), case.reference()
    errors = {name: relative_error(getattr(made, name), getattr(wanted, name)) for name in NAMES}
    assert all(error <= LIMITS[name] for name, error in errors.items()), errors


# ---------- the workload


def test_workloads_are_equal_whether_the_width_is_said_or_not() -> None:
    plain, said = Workload(1, 8, 8, 4, 2, 64), Workload(1, 8, 8, 4, 2, 64, torch.float32, 64)
    assert plain == said and hash(plain) == hash(said) and plain.value_dim == 64
    assert repr(plain) == repr(said) and "value_dim" not in repr(plain) and "value_dim" not in plain.to_dict()
    other = replace(plain, value_dim=32)
    assert other != plain and "value_dim=32" in repr(other) and other.to_dict()["value_dim"] == 32
    assert (plain.ring_bytes(2), other.ring_bytes(2)) == (8 * 2 * 128 * 4 // 2, 8 * 2 * 96 * 4 // 2)
    with pytest.raises(ConfigurationError, match="value_dim=0: every size must be a positive integer"):
        Workload(1, 8, 8, 4, 2, 64, torch.float32, 0)
