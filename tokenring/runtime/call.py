"""One call as it runs: its tensors, and the loop over the steps of a bound program that are done to them.

The loop is plain, with the clock, or with names for profilers. While a profiler of torch is at work, each instruction
runs in a range that says what it is. torch.profiler shows them beside its operators; torch.autograd.profiler.emit_nvtx
makes them NVTX ranges. At other times nothing is named, and a pass asks once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.profiler import record_function

from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import Work
from tokenring.lowering.program import Instruction, Program

if TYPE_CHECKING:
    from tokenring.backends.interfaces import Transport
    from tokenring.ir.schedule_data import Kind
    from tokenring.runtime.trace import Trace


@dataclass
class ActiveCall:
    """The tensors of one call. `own` holds q, k, v, dout [B, T, H, D] and lse, delta [B, H, T] by name.

    kernel_of: makes the call's kernel of the program's: one that takes any delta, as where on some rank a gradient
    flows into lse (on this rank one does if `own` has a dlse [B, H, T]), or one with the weights that expand latents.
    kernel: of this call alone, where rows are prepared for it.
    """

    own: dict[str, torch.Tensor]
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # slot → bytes that outlive the pass
    outputs: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # slot → field → [T, B, H, ...]
    handles: dict[int, Work] = field(default_factory=dict)
    kernel_of: Callable[[Any], Any] | None = None
    kernel: Any = None
    running: dict[int, Any] = field(default_factory=dict)  # by the first instruction of a run: results so far


class BoundPass(Protocol):
    """One pass of a linear layer or a collective, bound to memory: a program of ours, or an operator of a vendor's."""

    @property
    def transport(self) -> Transport | None:
        """The transport by which the other ranks hear of errors; None for one rank."""

    def run(self, call: ActiveCall) -> None:
        """Run the pass on a call's own tensors. Raises PeerLost."""

    def result(self, call: ActiveCall, kind: Kind, name: str) -> torch.Tensor:
        """Return a field of this rank's own result, [1, rows, 1, width]; see Executor.result."""


Step = Callable[[ActiveCall], None]


def run(bound: BoundPass, own: dict[str, torch.Tensor]) -> ActiveCall:
    """Run a bound pass on this rank's tensors. Raises PeerLost."""
    active = ActiveCall(own)
    with torch.autocast(next(iter(own.values())).device.type, enabled=False):
        bound.run(active)
    return active


def taken(made: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a result in this dtype, the caller's to keep: what lies in a pool is in fp32, and copied by that."""
    return made.to(dtype)


def profiling() -> bool:
    """Tell whether a profiler of torch is at work."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def run_steps(
    program: Program,
    instructions: Sequence[tuple[Instruction, int]],
    steps: Sequence[Step],
    named: Sequence[Step] | None,
    call: ActiveCall,
    trace: Trace | None,
) -> None:
    """Run all steps of a program, in order. named: the same steps in ranges, taken while a profiler is at work."""
    if named is None:
        _loop(program, instructions, steps, call, trace)
        return
    with record_function(f"tokenring {program.direction}"):
        _loop(program, instructions, named, call, trace)


def _loop(
    program: Program,
    instructions: Sequence[tuple[Instruction, int]],
    steps: Sequence[Step],
    call: ActiveCall,
    trace: Trace | None,
) -> None:
    if trace is None:
        for step in steps:
            step(call)
        return
    from tokenring.runtime.trace import Event

    clock = device_of(next(iter(call.own.values()))).stream_clock  # moves on other streams go on
    for step, (instruction, number) in zip(steps, instructions, strict=True):
        began = clock()
        step(call)
        trace.events.append(Event(program.rank, program.direction, number, instruction, began, clock()))


def ranged(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """Return the steps, each in a range of its name."""
    return [_ranged(step, name) for step, name in zip(steps, names, strict=True)]


def _ranged(step: Step, name: str) -> Step:
    def run(call: ActiveCall) -> None:
        with record_function(name):
            step(call)

    return run
