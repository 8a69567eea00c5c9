"""A profile reads like the schedule: a range for each pass and each instruction, and none where nobody looks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import Case
from ranks import Here, RankPools
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from tokenring import ContextParallel, attention, shard
from tokenring.api.inputs import make_request
from tokenring.ir.schedule_data import PASSES
from tokenring.runtime import call as loop
from tokenring.runtime.labels import range_names
from tokenring.sequence.workload import Request

OURS = "tokenring "


def case_of(schedule: str) -> Case:
    return Case(2, schedule, "zigzag", "causal", 4, 2, 1, 16, torch.float32, None)


def both_passes(here: Here, case: Case) -> tuple[Any, Any]:
    cp = here.cp(layout=case.layout, schedule=case.schedule)
    q, k, v, dout = (shard(x, cp).requires_grad_(index < 3) for index, x in enumerate(case.inputs()))

    def run() -> None:
        torch.autograd.grad(attention(q, k, v, cp, case.mask), (q, k, v), dout)

    run()
    return run, (cp, make_request(q, k, v, cp, case.mask, None))


def profiled(here: Here, case: Case) -> tuple[list[str], list[str], list[str]]:
    """The ranges in the order in which they began, those that there should be, and what lies in a tile's."""
    run, (cp, request) = both_passes(here, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run()
        events = sorted(seen.events(), key=lambda event: (event.time_range.start, -event.time_range.end))
    names = [event.name for event in events if event.name.startswith(OURS)]
    (tile, *_) = (event for event in events if ": attend" in event.name)
    return names, expected(cp, request), [child.name for child in tile.cpu_children]


def expected(cp: ContextParallel, request: Request) -> list[str]:
    """The ranges of both passes."""
    wanted = []
    for direction in PASSES:
        made = cp.executor(request, direction)
        supports = cp.kernel(request.device).supports_patch
        wanted += [f"{OURS}{direction}", *range_names(cp.plan(request).schedule, made.program, supports)]
    return wanted


@pytest.mark.parametrize("schedule", ["ring", "tokenring", "ulysses"])
def test_ranges(schedule: str, ranks: RankPools) -> None:
    for rank, (names, wanted, inside) in enumerate(ranks(2)(profiled, case_of(schedule))):
        assert names == wanted
        assert any("scaled_dot_product" in each for each in inside)
        if schedule == "ring":
            sends = [name for name in names if name.startswith(f"{OURS}forward 0: send kv{rank}")]
            assert sends and sends[0].endswith(f" to {1 - rank}")
            assert any(name.startswith(f"{OURS}forward 1: attend q") for name in names)


@contextmanager
def opened() -> Iterator[list[str]]:
    """The ranges that are opened inside."""
    names: list[str] = []
    whole: Any = vars(loop)["record_function"]

    class Watched(whole):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            names.append(name)
            super().__init__(name)

    vars(loop)["record_function"] = Watched
    try:
        yield names
    finally:
        vars(loop)["record_function"] = whole


def unseen(here: Here, case: Case) -> list[str]:
    """Which ranges are opened while no profiler is at work."""
    run, _ = both_passes(here, case)
    with opened() as names:
        run()
        count = len(names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with profile(activities=[ProfilerActivity.CPU]):
                run()
        assert len(names) > 10
    return names[:count]


def test_no_ranges_without_a_profiler(ranks: RankPools) -> None:
    assert ranks(2)(unseen, case_of("ring")) == [[], []]


def under_nvtx(here: Here, case: Case) -> tuple[list[str], list[str]]:
    """The ranges that are opened, and those that there should be.

    Without CUDA, torch refuses its state for NVTX: the one for ITT takes its place, which makes ranges the same way.
    """
    run, context = both_passes(here, case)
    torchs: Any = profiler
    config, states = torchs.ProfilerConfig, torchs.ProfilerState

    def itt(state: Any, *others: Any) -> Any:
        assert state == states.NVTX
        return config(states.ITT, *others)

    with pytest.MonkeyPatch.context() as patched, opened() as names:
        patched.setattr(profiler, "ProfilerConfig", itt)
        patched.setattr(torch.cuda, "synchronize", lambda *_: None)
        with profiler.emit_nvtx():  # type: ignore[no-untyped-call]
            run()
        inside = list(names)
        run()
        assert names == inside, "it is over"
    return inside, expected(*context)


@pytest.mark.skipif(torch.version.cuda is not None, reason="made for torch without CUDA")
def test_nvtx(ranks: RankPools) -> None:
    for names, wanted in ranks(2)(under_nvtx, case_of("tokenring")):
        assert names == wanted and len(names) > 10
