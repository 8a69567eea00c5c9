"""Programs: how many slots they need, what their kernel calls compute, and that they are always the same."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from bases import CHUNKS_A_RANK, MASKS, NAMED, TOKENS, bases, make, mask_of, ulysses
from pairwise import sample
from patience import patient
from programs import check_both_passes, lower_all

from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.calls import Supports, anything
from tokenring.lowering.program import Attend, Program
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import build
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Causal
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload

DTYPES = (torch.float32, torch.bfloat16)
KINDS = ("q", "kv", "q_partial", "kv_partial")


def size_of(schedule: Schedule, dtype: torch.dtype = torch.bfloat16) -> Workload:
    groups = schedule.head_groups
    return Workload(1, schedule.q_layout.length, schedule.kv_layout.length, groups, groups, 2, dtype)


def slots(program: Program) -> tuple[int, ...]:
    """How many there are of each kind; each result has one at home."""
    counted = Counter(slot.kind for slot in program.slots)
    return tuple(counted[kind] for kind in KINDS)  # type: ignore[index]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("mask", ["full", "causal"])
class TestSlots:
    @pytest.mark.parametrize("name", ["ring+", "ring-"])
    def test_ring_needs_two(self, name: str, mask: str, early: bool) -> None:
        """One that is sent on, one that comes. Backward has the gradients that follow, as many at any P."""
        for ranks in (2, 3, 4, 5, 8, 12, 16) if early else (2, 3, 8):
            made = make(ranks, name, "zigzag", mask)
            forward = lower_all(made, size_of(made), "forward", early_receives=early)
            assert {slots(program) for program in forward} == {(0, 2, 1, 0)}
            if ranks in (3, 4, 8, 12):
                backward = [slots(each) for each in lower_all(made, size_of(made), "backward", early_receives=early)]
                assert {each[:3] for each in backward} == {(0, 2, 1)}
                assert max(each[3] for each in backward) <= 6

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    @pytest.mark.parametrize("name", ["tokenring+", "tokenring-"])
    def test_tokenring_needs_as_many_at_any_size(self, name: str, direction: Pass, mask: str, early: bool) -> None:
        """Two for q; of results one at home, and three each on their way there and back: sent now, in the last
        step, and two before."""
        for ranks in (4, 5, 12):
            made = make(ranks, name, "zigzag", mask)
            programs = lower_all(made, size_of(made), direction, early_receives=early)
            assert {slots(program) for program in programs} == {(2, 0, 7, 0 if direction == "forward" else 1)}

    def test_direct_needs_one_for_each_peer(self, mask: str, early: bool) -> None:
        for ranks in (2, 5, 8):
            others = ranks - 1
            for name, direction, wanted in (
                ("direct-kv", "forward", (0, 1 + others, 1, 0)),
                ("direct-kv", "backward", (0, 1 + others, 1, 1 + 2 * others)),
                ("direct-q", "forward", (1 + others, 0, 1 + 2 * others, 0)),
                ("direct-q", "backward", (1 + others, 0, 1 + 2 * others, 1)),
            ):
                made = make(ranks, name, "zigzag", mask, tokens=64)
                programs = lower_all(made, size_of(made), direction, early_receives=early)  # type: ignore[arg-type]
                assert {slots(program) for program in programs} == {wanted}, (name, direction)

    @pytest.mark.parametrize("name", ["direct-kv", "direct-q"])
    def test_small_direct_computes_in_two_calls(self, name: str, mask: str, early: bool) -> None:
        """What is at hand, then all that comes, side by side in one slot beside the slot that is sent from."""
        made = make(4, name, "contiguous", mask)
        for program in lower_all(made, size_of(made), "forward", early_receives=early):
            kind = "kv" if name == "direct-kv" else "q"
            assert sum(slot.kind == kind for slot in program.slots) <= 2
            attends = [each for each in program.instructions if isinstance(each, Attend)]
            assert len(attends) <= (2 if mask == "full" else 3)

    def test_alone_needs_none_but_home(self, mask: str, early: bool) -> None:
        for name in NAMED:
            made = make(1, name, "zigzag", mask)
            (program,) = lower_all(made, size_of(made), "backward", early_receives=early)
            assert slots(program) == (0, 0, 1, 1)


# ---------- kernel calls


def whole_or_causal(patch: Patch) -> str | None:
    return None if patch.is_full or patch.is_causal else "neither full nor causal"


def small(patch: Patch) -> str | None:
    return None if patch.rows <= 3 else "too many rows"


def unit_steps(patch: Patch) -> str | None:
    return None if patch.row_step == patch.col_step == 1 else "striped"


def row_by_row(patch: Patch) -> str | None:
    return "never"


SUPPORTS = {"anything": anything, "whole": whole_or_causal, "small": small, "unit": unit_steps, "never": row_by_row}


@pytest.mark.parametrize(
    ("ranks", "named", "layout", "mask", "pieces", "kernel", "dtype", "early"),
    sample(
        {
            "ranks": (1, 2, 3, 4, 6),
            "named": NAMED,
            "layout": tuple(CHUNKS_A_RANK),
            "mask": MASKS,
            "pieces": (1, 2, 4),
            "kernel": tuple(SUPPORTS),
            "dtype": DTYPES,
            "early": (True, False),
        },
        least=0,
    ),
)
def test_each_visible_pair_is_in_one_kernel_call(
    ranks: int, named: str, layout: str, mask: str, pieces: int, kernel: str, dtype: torch.dtype, early: bool
) -> None:
    """In both passes, with the positions that really lie in the rows; and every result comes home whole."""
    made = make(ranks, named, layout, mask, max(pieces, 2) if named == "bidirectional" else pieces)
    check_both_passes(made, size_of(made, dtype), SUPPORTS[kernel], early)
    check_supported(made, SUPPORTS[kernel])


def check_supported(made: Schedule, supports: Supports) -> None:
    for program in lower_all(made, size_of(made), supports=supports):
        for call in program.instructions:
            if isinstance(call, Attend):
                assert supports(call.patch) is None or call.patch.rows == 1


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("base", BASES := bases())
def test_unnamed_schedules_too(base: str, early: bool) -> None:
    for dtype in DTYPES:
        check_both_passes(BASES[base], size_of(BASES[base], dtype), whole_or_causal, early)


@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
@pytest.mark.parametrize("layouts", [("zigzag", "striped"), ("contiguous", "zigzag/2"), ("striped/2", "zigzag")])
@pytest.mark.parametrize("named", ["ring", "tokenring", "direct-q"])
def test_q_and_kv_of_different_layouts(named: str, layouts: tuple[str, str], mask: str) -> None:
    q_layout, kv_layout = (make_layout(layout, 3, 48) for layout in layouts)
    made = make_schedule(named, q_layout, kv_layout, mask_of(mask, 48)).verify()
    check_both_passes(made, size_of(made), unit_steps)


def test_q_and_kv_of_different_lengths() -> None:
    for named in ("ring", "tokenring", "direct-q", "direct-kv", "bidirectional"):
        made = make_schedule(named, make_layout("zigzag", 3, 12), make_layout("striped", 3, 60), mask_of("full", 12))
        check_both_passes(made, size_of(made))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "zigzag"),
        (3, "zigzag"),
        (4, "zigzag"),
        (8, "zigzag"),
        (4, "contiguous"),
        (4, "zigzag/2"),
        (3, "contiguous/2"),
    ],
)
def test_ulysses_is_one_causal_call_a_rank(layout: str, ranks: int) -> None:
    """Wherever its chunks came from, a rank that holds the whole sequence computes one triangle."""
    whole = make_layout(layout, ranks, ranks * CHUNKS_A_RANK[layout] * TOKENS)
    made = build(ulysses(ranks, frozenset({"q", "kv"})), whole, whole, Causal()).verify()
    for direction in PASSES:
        for program in lower_all(made, size_of(made), direction):
            (call,) = [each for each in program.instructions if isinstance(each, Attend)]
            assert call.patch == Patch(0, whole.length, 0, whole.length, None, 0)
            assert call.patch.is_causal
    check_both_passes(made, size_of(made))


def test_stripes_do_not_fuse() -> None:
    """Rows lie chunk by chunk, and stripes of P are no range: a call for each pair of them, but exact."""
    whole = make_layout("striped", 3, 24)
    made = build(ulysses(3), whole, whole, Causal()).verify()
    for program in lower_all(made, size_of(made)):
        assert sum(isinstance(each, Attend) for each in program.instructions) == 3 * 3
    check_both_passes(made, size_of(made))


@pytest.mark.parametrize(("layout", "calls"), [("contiguous", 1), ("zigzag", 1), ("zigzag/2", 1), ("striped", 1)])
def test_local_tile_of_a_causal_ring_is_one_call(layout: str, calls: int) -> None:
    """Two chunks that lie apart in the sequence are one triangle for the rank that holds them."""
    made = make(4, "ring+", layout, "causal")
    for program in lower_all(made, size_of(made)):
        local = [each for each in program.instructions if isinstance(each, Attend) and each.step == 0]
        assert len(local) == calls
        assert all(call.patch.is_causal for call in local)


def test_calls_of_a_causal_zigzag_ring() -> None:
    """One call a step: a triangle, then halves of the rectangle, in rows or in columns."""
    made = make(8, "ring-", "zigzag", "causal")
    for program in lower_all(made, size_of(made)):
        found = [each for each in program.instructions if isinstance(each, Attend)]
        assert [call.step for call in found] == sorted({call.step for call in found})
        assert sum(call.patch.pairs() for call in found) == 8 * 2 * TOKENS**2 + TOKENS


# ---------- always the same


def fingerprint() -> str:
    """Of all programs of all base schedules. Also run in other processes."""
    found = hashlib.sha256()
    for name, schedule in bases().items():
        if name.endswith("causal"):
            for direction in PASSES:
                found.update(repr(lower_all(schedule, size_of(schedule), direction)).encode())
    return found.hexdigest()


def test_programs_are_deterministic(warm: str) -> None:
    """Also in processes where sets of names iterate in another order."""
    code = "import test_lower; print(hash('kv'), test_lower.fingerprint())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [warm, "-c", code]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(100), check=True)
    hashed, found = other.stdout.split()
    assert int(hashed) != hash("kv") or "PYTHONHASHSEED" in os.environ
    assert found == fingerprint()
