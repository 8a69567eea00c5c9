"""A rank that dies, stops, fails or leaves is named by all others, in time; nothing is left. ci/kills.py runs more."""

from __future__ import annotations

import pytest
from faults import (
    KINDS,
    LIMIT_SECONDS,
    MAY_WAIT,
    PASSES,
    SCHEDULES,
    TRANSPORTS,
    WORLD_SIZE,
    Case,
    Found,
    Outcome,
    run_cases,
)


def sample() -> list[Case]:
    """Every kind in three schedules, on both transports and in both passes, with different victims."""
    cases = []
    for number in range(3 * len(KINDS)):
        kind, turn = number % len(KINDS), number // len(KINDS)
        schedule = SCHEDULES[(kind + 2 * turn) % len(SCHEDULES)]
        transport, passes = TRANSPORTS[(turn + kind) % 2], PASSES[number % 2]
        cases.append(Case(KINDS[kind], schedule, transport, passes, number % WORLD_SIZE, number, reform=turn == 0))
    return cases


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_survivors_know_who_is_lost() -> None:
    found = run_cases(sample())
    assert not (troubles := [each for case in found for each in case.troubles()]), "\n".join(troubles)
    named = [each.named == case.case.victim for case in found for each in case.outcomes]
    assert len(named) == (WORLD_SIZE - 1) * len(sample())
    assert sum(named) >= 0.95 * len(named)
    for case in found:
        if case.case.transport == "shm":
            assert all(each.certain for each in case.outcomes), case


def test_the_sample() -> None:
    cases = sample()
    for what in ("transport", "passes", "schedule"):
        every = {(case.kind, getattr(case, what)) for case in cases}
        assert len(every) == len(KINDS) * (3 if what == "schedule" else 2)
    assert {case.victim for case in cases} == set(range(WORLD_SIZE))
    assert any(case.victim == 0 and case.kind == kind for case in cases for kind in ("killed", "stopped"))


def test_what_counts_as_trouble() -> None:
    case = Case("killed", "ring", "shm", "forward", 2, 0)
    fine = Outcome(0, "PeerLost", 2, True, 1.0, "")
    assert not Found(case, [fine, Outcome(1, "PeerLost", None, False, 1.0, "")], []).troubles()
    for wrong, says in (
        (Outcome(1, "PeerLost", 3, True, 1.0, ""), "rank 1 named the living rank 3"),
        (Outcome(1, "PeerLost", 2, True, LIMIT_SECONDS + 2.1, ""), "rank 1 knew after 5.1 s"),
        (Outcome(1, "RuntimeError", 2, True, 1.0, "oh"), "rank 1 raised RuntimeError: oh"),
    ):
        assert says in Found(case, [fine, wrong], []).troubles()[0]
    neighbour = Outcome(1, "PeerLost", 3, False, 1.0, f"rank 3 {MAY_WAIT}")
    assert not Found(case, [fine, neighbour], []).troubles()
    assert Found(case, [fine], ["rank 1 ended with exit code -11"]).troubles()
