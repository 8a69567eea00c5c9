"""Random calls for a while; benchmarks/soak.py runs more of them. And what is drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draws import AS_SCHEMES, BY_NAME, PASSES, STRIDES, Draw
from faults import lasting_names
from held import Held, held
from random_calls import BF16_RATIO, CALLS, LEAST_ROUNDS, SPARE_MB, Soaked, soak
from ranks import RankPools
from sampling import FULL_GRID

WORLD_SIZE = 4
FEW_CALLS = 6  # of a round


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_rounds(ranks: RankPools) -> None:
    """As few as tell files, threads and large leaks, or those of a minute with TOKENRING_FULL_GRID=1."""
    seconds, calls = (60.0, CALLS) if FULL_GRID else (0.0, FEW_CALLS)
    made = soak(ranks, seconds, 1, WORLD_SIZE, calls)
    assert not (grown := made.growth()), grown
    assert made.calls["calls"] == calls * len(made.held)
    assert not lasting_names()


def test_what_is_drawn() -> None:
    """Everything, in a few rounds; and on every rank the same."""
    draw, same = Draw("0", WORLD_SIZE), Draw("0", WORLD_SIZE)
    contexts = [draw.context() for _ in range(300)]
    assert contexts == [same.context() for _ in range(300)]
    assert {each.schedule for each in contexts} == {*BY_NAME, *AS_SCHEMES}
    assert {len(each.members) for each in contexts} == {2, 3, 4}
    calls = [draw.call(each) for each in contexts]
    assert list(map(str, calls)) == list(map(str, (same.call(each) for each in contexts)))
    assert {each.passes for each in calls} == set(PASSES)
    assert {each.strides for each in calls} == set(STRIDES)
    assert {each.case.dtype for each in calls} == {torch.float32, torch.bfloat16}
    assert {each.case.kv_length > each.case.q_length for each in calls} == {True, False}
    for each in calls:
        each.case.make_schedule() if each.case.schedule in ("ring", "tokenring") else None
        each.case.mask.check_length(each.case.q_length)


class TestTheChecks:
    def rounds(self, last: Held) -> Soaked:
        first = held()
        return Soaked(held=[[first, first]] * (LEAST_ROUNDS - 1) + [[first, last]])

    def test_growth(self) -> None:
        now = held()
        assert not self.rounds(now).growth()
        assert not self.rounds(replace(now, rss_mb=now.rss_mb + SPARE_MB / 2)).growth()
        more = replace(now, rss_mb=now.rss_mb + 1.5 * SPARE_MB, files=now.files + 1, threads=now.threads + 1)
        found = self.rounds(more).growth()
        assert [each.split()[:3] for each in found] == [["rank", "1:", name] for name in ("rss_mb", "files", "threads")]

    def test_ratio(self) -> None:
        drawn = Draw("0", WORLD_SIZE)
        call = drawn.call(drawn.context())
        made = Soaked()
        made.judge(call, {"out": 1.1, "lse": 9.0, "dq": 0.0}, {"out": 1.0, "dq": 0.0})
        assert made.worst["bf16 ratio of out"][0] == 1.1
        for wrong in (BF16_RATIO + 0.01, float("nan"), float("inf")):
            with pytest.raises(AssertionError, match="out: bf16 ratio"):
                made.judge(call, {"out": wrong}, {"out": 1.0})
