"""A rank that dies, stops, fails or leaves is named by all others; nothing is left.

benchmarks/kill_ranks.py runs more, and holds the ranks to their time limit.
"""

from __future__ import annotations

from itertools import product

import pytest
from faults import KINDS, PASSES, SCHEDULES, WITHIN_SECONDS, WORLD_SIZE, Case, Found, Outcome, run_cases
from machines import APART
from patience import patient
from sampling import FULL_GRID

from tokenring.backends.control.control import MAY_WAIT

WAYS = tuple(product(("gloo", "shm"), PASSES))


def sample() -> list[Case]:
    """Every kind on both transports and in both passes, in different schedules; and between machines."""
    cases = []
    for number, (kind, way) in enumerate(product(KINDS, range(len(WAYS)))):
        turn = KINDS.index(kind)
        schedule, victim = SCHEDULES[(turn + way) % len(SCHEDULES)], (turn + way) % WORLD_SIZE
        cases.append(Case(kind, schedule, *WAYS[way], victim, number, reform=way == turn % len(WAYS)))
    apart = [Case(kind, "tokenring", APART, "backward", 1 + number, number) for number, kind in enumerate(KINDS[:3])]
    return cases + apart


def part_of(cases: list[Case]) -> list[Case]:
    """Each kind on both transports, in one pass on each; all that form a new group, and between machines."""
    halves = [{WAYS[0], WAYS[3]}, {WAYS[1], WAYS[2]}]
    ways = {case.kind: half for case in cases if case.reform for half in halves if way_of(case) in half}
    return [case for case in cases if case.transport == APART or way_of(case) in ways[case.kind]]


def way_of(case: Case) -> tuple[str, str]:
    return case.transport, case.passes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_survivors_know_who_is_lost() -> None:
    cases = sample() if FULL_GRID else part_of(sample())
    found = run_cases(cases)
    assert not (troubles := [each for case in found for each in case.troubles()]), "\n".join(troubles)
    named = [each.named == case.case.victim for case in found for each in case.outcomes]
    assert len(named) == (WORLD_SIZE - 1) * len(cases)
    assert sum(named) >= 0.95 * len(named)
    for case in found:
        if case.case.transport == "shm":
            assert all(each.certain for each in case.outcomes), case


def test_the_sample() -> None:
    cases = sample()
    for kind in KINDS:
        mine = [case for case in cases if case.kind == kind and case.transport != APART]
        assert {(case.transport, case.passes) for case in mine} == set(WAYS)
        assert {case.victim for case in mine} == set(range(WORLD_SIZE)) and any(case.reform for case in mine)
    assert {case.schedule for case in cases} == set(SCHEDULES)


def test_the_part() -> None:
    """Half of the ways; every kind is there in each pass and on each transport, and forms a new group once."""
    cases = [case for case in part_of(sample()) if case.transport != APART]
    for kind in KINDS:
        mine = [way_of(case) for case in cases if case.kind == kind]
        assert (
            len(mine) == 2 and {name for name, _ in mine} == {"gloo", "shm"} and {of for _, of in mine} == set(PASSES)
        )
    assert {case.victim for case in part_of(sample())} == set(range(WORLD_SIZE))
    assert {case.schedule for case in part_of(sample())} == set(SCHEDULES)
    assert [case.kind for case in cases if case.reform] == [case.kind for case in sample() if case.reform]
    assert {case.transport for case in part_of(sample())} == {"gloo", "shm", APART}


def test_what_counts_as_trouble() -> None:
    case = Case("killed", "ring", "shm", "forward", 2, 0)
    fine = Outcome(0, "PeerLost", 2, True, 1.0, "")
    assert not Found(case, [fine, Outcome(1, "PeerLost", None, False, 1.0, "")], []).troubles(WITHIN_SECONDS)
    for wrong, says in (
        (Outcome(1, "PeerLost", 3, True, 1.0, ""), "rank 1 named the living rank 3"),
        (Outcome(1, "PeerLost", 2, True, patient(WITHIN_SECONDS + 0.1), ""), "rank 1 knew after "),
        (Outcome(1, "RuntimeError", 2, True, 1.0, "oh"), "rank 1 raised RuntimeError: oh"),
    ):
        assert says in Found(case, [fine, wrong], []).troubles(WITHIN_SECONDS)[0]
    neighbour = Outcome(1, "PeerLost", 3, False, 1.0, f"rank 3 {MAY_WAIT}")
    assert not Found(case, [fine, neighbour], []).troubles()
    assert Found(case, [fine], ["rank 1 ended with exit code -11"]).troubles()
