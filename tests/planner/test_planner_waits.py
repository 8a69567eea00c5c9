"""Ranks that wait for the plan of rank 0: they hear that it is made, how far it is, and what it fails by."""

from __future__ import annotations

import logging
import re
import time
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
from nets import call, setting, workload
from patience import patient
from ranks import Here, RankPools
from test_planner_job import RANKS, exact

import tokenring as tr
from tokenring.launch.background import Background
from tokenring.planner.choosing.auto import plan_call
from tokenring.planner.choosing.planner import Planner
from tokenring.planner.interconnects.interconnect import full_mesh

SHORT_SECONDS = 2.0  # of a wait; longer on a busy machine


def slow(here: Here) -> tuple[bool, list[str]]:
    """A call whose planning takes twice as long as any wait may; whether it is right, and what was said meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tokenring")
    cp = tr.ContextParallel(layout="contiguous", transport="gloo", timeout_seconds=patient(SHORT_SECONDS))
    plans = cp._planner.plan

    def late(*arguments: Any) -> Any:
        found = plans(*arguments)
        time.sleep(2 * patient(SHORT_SECONDS))
        return found

    cp._planner.plan = late  # type: ignore[assignment, method-assign]
    log.addHandler(handler)
    try:
        with cp, patch("tokenring.planner.choosing.planner.SAY_AGAIN", 1):
            return exact(cp), lines
    finally:
        log.removeHandler(handler)


def test_who_waits_for_a_plan_hears_that_it_is_made(ranks: RankPools) -> None:
    """Rank 0 alone also says how far it is."""
    (right, said), *others = ranks(RANKS)(slow)
    assert right and others == [(True, [])] * (RANKS - 1)
    line = re.compile(r"rank 0 plans: \d+ of \d+ schedules; the other ranks wait")
    assert said and all(map(line.fullmatch, said))


def test_progress_counts_what_is_looked_at() -> None:
    asked = call(setting(full_mesh(4, 1.0), workload(4, (4, 4), 64), tflops=1e-2), tr.Causal())
    plan = plan_call(asked)
    assert str(asked.progress) == f"{asked.progress.known} of {asked.progress.known} schedules"
    assert asked.progress.known >= len(plan.candidates)


def test_work_aside() -> None:
    def wrong() -> int:
        raise KeyError("no")

    gate = Event()
    waiting = Background(lambda: gate.wait(patient(20)) and 7)
    with pytest.raises(TimeoutError):
        waiting.result(0.01)
    gate.set()
    assert waiting.result(20) == 7
    with pytest.raises(KeyError, match="no"):
        Background(wrong).result(20)


def test_a_time_limit_of_the_work_itself_is_no_reason_to_wait_on() -> None:
    """As of a file on a network: rank 0 must not say for ever that it still plans."""

    def late() -> bytes:
        raise TimeoutError("the file server")

    class Told:
        error: BaseException | None = None

        def fail(self, error: BaseException) -> None:
            self.error = error

    told = Told()
    with pytest.raises(TimeoutError, match="the file server"):
        Planner._so_far(Background(late), told)  # type: ignore[arg-type]
    assert isinstance(told.error, TimeoutError)
