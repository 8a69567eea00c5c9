"""Candidates of the race: the cut of the sequence that each wants, and the call that is timed.

B batch, T local tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

import tokenring as tr
from tokenring.cli.bench.results import ONE, OURS, RaceCase
from tokenring.cli.bench.sleeping import SleepingContext
from tokenring.display.console import cores
from tokenring.emulate.shapes import EmulatedFabric, Shape
from tokenring.emulate.ways import Load, heaviest
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.footprint import flops_per_pair
from tokenring.planner.interconnects.emulated import computing_machine, interconnect_of_shape, sleeping_machine
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.layouts.balanced import layout_of
from tokenring.planner.machines.machine import CPU
from tokenring.sequence.layout import AUTO, Layout
from tokenring.sequence.mask import Mask, parse_mask

if TYPE_CHECKING:
    from tokenring.backends.interfaces import Transport

WAIT_SECONDS = 600.0  # for other ranks
ONE_PROCESS_FLOPS = 8e12  # forward and backward; above, the plain kernel would take minutes a round

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


class NotRun(Exception):
    """A candidate that has nothing to do with such a case; the message says why."""


class NotInstalled(Exception):
    """A peer that is not installed; the message says how to install it."""


@dataclass(frozen=True)
class TensorForm:
    """The form in which a candidate wants its tensors: from BTHD, and back to it. Neither conversion is timed."""

    into: Change
    back: Change


BTHD = TensorForm(lambda x: x, lambda x: x)
BHTD = TensorForm(lambda x: x.transpose(1, 2).contiguous(), lambda x: x.transpose(1, 2))
THD = TensorForm(lambda x: x.squeeze(0), lambda x: x.unsqueeze(0))


class RaceNote(NamedTuple):
    """A note about what was run: `where` names the modules that it is about."""

    text: str
    where: str


@dataclass(frozen=True)
class Runner:
    """A candidate that is ready on this rank: `attend` takes the tokens at `positions`, in `form`.

    takes_part: whether this rank calls it. A rank without tokens of a split sequence does: its chunks are empty.
    """

    what: str
    positions: torch.Tensor
    attend: Attend
    form: TensorForm = BTHD
    threads: int = 1
    link_bytes: int | None = None
    load: Load | None = None
    notes: tuple[RaceNote, ...] = ()
    takes_part: bool = True


@dataclass
class RaceSetting:
    """The setting that candidates get: the case, and this rank of so many."""

    case: RaceCase
    rank: int
    ranks: int

    @cached_property
    def mask(self) -> Mask:
        """The mask of the case."""
        return parse_mask(self.case.mask)

    @cached_property
    def transport(self) -> str | Transport:
        """The transport that all schedules share. All ranks must get here together."""
        made = tr.ContextParallel(transport=self.case.transport, timeout_seconds=WAIT_SECONDS)
        return made.transport or self.case.transport

    def is_plain(self) -> bool | None:
        """Return True for the causal mask, False for the full one, None for any other."""
        return {"causal": True, "full": False}.get(str(self.mask))

    def positions(self, layout: str) -> torch.Tensor:
        """Return this rank's positions in a layout: int64 [T]. Raises ConfigurationError if the length does not fit."""
        return torch.tensor(self.layout(layout).positions(self.rank), dtype=torch.int64)

    def layout(self, name: str) -> Layout:
        """Return the layout of this name. Raises ConfigurationError if the length does not fit."""
        return layout_of(name, self.ranks, self.case.seq_len, self.mask)


@dataclass(frozen=True)
class RacedSchedule:
    """A candidate to race. `prepare` gets the setting and, for peers, a process group that no other candidate uses.

    It raises NotRun, NotInstalled, or whatever else goes wrong, and does so on all ranks or on none.
    """

    name: str
    kind: str
    prepare: Callable[[RaceSetting, Any], Runner]
    version: str | None = None


def our_candidates(case: RaceCase) -> list[RacedSchedule]:
    """Return a candidate for each schedule that is asked for."""
    return [
        RacedSchedule(name, OURS, lambda setting, group, name=name: _schedule_runner(setting, name), tr.__version__)  # type: ignore[misc]
        for name in case.schedules
    ]


def emulated(shape: Shape, tflops: float | None) -> Interconnect:
    """Return the links as an interconnect, with ranks on one machine: kernels that sleep, or compute on its cores."""
    machine = computing_machine(CPU, shape) if tflops is None else sleeping_machine(tflops, shape)
    return interconnect_of_shape(shape, machine)


def _schedule_runner(setting: RaceSetting, name: str) -> Runner:
    case, mask = setting.case, setting.mask
    options: dict[str, Any] = {
        "layout": setting.layout(case.layout) if case.layout == AUTO else case.layout,
        "schedule": name,
        "transport": setting.transport,
        "pieces": case.pieces,
        "timeout_seconds": WAIT_SECONDS,
        "topology": None if case.emulate is None else emulated(case.emulate, case.compute_tflops),
    }
    rate = case.compute_tflops
    cp = tr.ContextParallel(**options) if rate is None else SleepingContext(rate, **options)
    positions = tr.positions(cp, case.seq_len)
    try:
        with torch.set_grad_enabled(case.backward):
            plan = tr.plan(*_shapes_only(case, positions.numel()), cp, mask)
    except (tr.ConfigurationError, tr.UnsupportedError) as error:
        raise NotRun(str(error)) from None
    passes = PASSES if case.backward else PASSES[:1]
    moved = [plan.schedule.link_bytes(plan.workload, direction) for direction in passes]
    loads: Counter[tuple[int, int]] = Counter()
    for each in moved:
        loads.update(each)
    chosen = f"takes {plan.name}, " if plan.name != name else ""
    return Runner(
        f"schedule, {chosen}{case.layout}",
        positions,
        lambda q, k, v: tr.attention(q, k, v, cp, mask=mask),
        link_bytes=max(loads.values(), default=0),
        load=None if case.emulate is None else _load(case.emulate.fabric, moved),
    )


def _load(fabric: EmulatedFabric, moved: list[dict[tuple[int, int], int]]) -> Load:
    """Return the load of passes one after the other: their heaviest wires' seconds, and the heaviest of them."""
    loads = [load for each in moved if (load := heaviest(fabric, each)) is not None]
    longest = max(loads, key=lambda load: load.seconds, default=Load("none", 0.0))
    return Load(longest.wire, sum(load.seconds for load in loads))


def _shapes_only(case: RaceCase, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v of the right sizes, without memory of their own."""
    one = torch.zeros((), dtype=getattr(torch, case.dtype))
    sizes = (case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.of_values)
    q, k, v = (one.expand(case.batch, tokens, *size) for size in sizes)
    return q, k, v


def one_process() -> RacedSchedule:
    """Return the candidate of torch's plain kernel over the whole sequence: rank 0 alone, one thread for each rank."""
    return RacedSchedule("one process", ONE, _one_process_runner, torch.__version__)


def _one_process_runner(setting: RaceSetting, group: Any) -> Runner:
    case, causal = setting.case, setting.is_plain()
    if causal is None:
        raise NotRun("for full and causal masks only")
    if flops(case, causal) > ONE_PROCESS_FLOPS:
        raise NotRun(
            f"{flops(case, causal) / 1e12:,.0f} Tflop are over its limit of {ONE_PROCESS_FLOPS / 1e12:g}: "
            f"one process would take minutes a round"
        )
    threads = min(setting.ranks, cores())
    grouped = case.heads != case.kv_heads

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return Runner(
        f"torch's kernel, {threads} thread{'s' if threads > 1 else ''}",
        torch.arange(case.seq_len if setting.rank == 0 else 0),
        attend,
        BHTD,
        threads,
        takes_part=setting.rank == 0,
    )


def flops(case: RaceCase, causal: bool) -> float:
    """Return the operations of forward and backward, or of forward alone."""
    pairs = case.seq_len * (case.seq_len + 1) / 2 if causal else case.seq_len**2
    passes = PASSES if case.backward else PASSES[:1]
    a_pair = sum(flops_per_pair(each, case.head_dim, case.of_values) for each in passes)
    return a_pair * case.batch * case.heads * pairs
