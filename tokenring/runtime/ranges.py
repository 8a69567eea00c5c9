"""The loop over a program's steps: plain, with the clock, or with names for profilers.

While a profiler of torch is at work, each instruction runs in a range that says what it is. torch.profiler shows them
beside its operators; torch.autograd.profiler.emit_nvtx makes them NVTX ranges. At other times nothing is named, and
a pass asks once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.autograd.profiler import record_function

from tokenring.backends.devices import device_of
from tokenring.runtime.trace import Event, Trace

if TYPE_CHECKING:
    from tokenring.runtime.executor import Call, Executor

C = TypeVar("C")
Step = Callable[[C], None]


def run_steps(executor: Executor, call: Call, trace: Trace | None) -> None:
    """All steps of a program, in order."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        _loop(executor, executor.steps, call, trace)
        return
    with record_function(f"tokenring {executor.program.direction}"):
        _loop(executor, executor.ranged_steps, call, trace)


def _loop(executor: Executor, steps: Sequence[Step[Call]], call: Call, trace: Trace | None) -> None:
    if trace is None:
        for step in steps:
            step(call)
        return
    program = executor.program
    clock = device_of(next(iter(call.own.values()))).stream_clock  # moves on other streams go on
    for step, (instruction, number) in zip(steps, executor.instructions, strict=True):
        began = clock()
        step(call)
        trace.events.append(Event(program.rank, program.direction, number, instruction, began, clock()))


def ranged(steps: Sequence[Step[C]], names: Sequence[str]) -> list[Step[C]]:
    """The steps, each in a range of its name."""
    return [_ranged(step, name) for step, name in zip(steps, names, strict=True)]


def _ranged(step: Step[C], name: str) -> Step[C]:
    def run(call: C) -> None:
        with record_function(name):
            step(call)

    return run
