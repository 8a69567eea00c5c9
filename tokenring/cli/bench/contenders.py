"""The schedules that race if none are named: the best member of each family that fits, and auto."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenring.backends.registry import kernel_for_planning
from tokenring.cli.bench.candidates import emulated
from tokenring.cli.bench.results import RaceCase
from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.target import IDEAL
from tokenring.planner.choosing.auto import CallToPlan, plan_call
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.layouts.balanced import layout_of
from tokenring.planner.machines.machine import machine_of_topology
from tokenring.planner.simulation.predict import Setting
from tokenring.schedule.families.registry import FAMILIES, misfit, parse
from tokenring.schedule.names import SCHEMES
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import parse_mask
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine
from tokenring.topology.ranks import Topology

MOST = 12  # families: the others are predicted to be slower than all of these
MOST_RANKS = 16  # above, planning takes too long for a default: what needs no parameters races


def contenders(case: RaceCase, ranks: int) -> list[str]:
    """Return the best member of each of the `MOST` best families, in the registry's order, then auto.

    Best is what the planner predicts, in one memory that all ranks share where links are not emulated. With `pieces`
    only what can move so, and no auto. Where nothing can be planned for, schemes without parameters: they say why.
    """
    layout = layout_of(case.layout, ranks, case.seq_len, parse_mask(case.mask))
    dtype = getattr(torch, case.dtype)
    heads = case.heads, case.kv_heads, case.head_dim
    size = Workload(case.batch, case.seq_len, case.seq_len, *heads, dtype, case.of_values)
    names = _best_of_families([name for name in _ranked(case, ranks, size, layout) if _fits(name, case, size, layout)])
    return [*(names or SCHEMES), *(["auto"] if case.pieces is None else [])]


def _ranked(case: RaceCase, ranks: int, size: Workload, layout: Layout) -> Sequence[str]:
    """Return all schedules that fit, the fastest first."""
    if not 1 < ranks <= MOST_RANKS:
        return [name for name, family in FAMILIES.items() if family.takes(0)]
    net, machine = _where(case, ranks, size.dtype)
    passes = PASSES if case.backward else PASSES[:1]
    target = transport_target("gloo") if case.emulate is not None else IDEAL
    setting = Setting(size, net, machine, passes, kernel_for_planning().supports_patch, target)
    try:
        plan = plan_call(CallToPlan(setting, layout, layout, parse_mask(case.mask)))
    except ConfigurationError:
        return []
    return [each.name for each in plan.candidates]


def _where(case: RaceCase, ranks: int, dtype: torch.dtype) -> tuple[Interconnect, Machine]:
    if case.emulate is not None:
        net = emulated(case.emulate, case.compute_tflops)
        assert net.machine is not None
        return net, net.machine
    here = Topology("machine without accelerators", ranks)
    return interconnect_of(here), machine_of_topology(here, dtype)


def _fits(name: str, case: RaceCase, size: Workload, layout: Layout) -> bool:
    if case.pieces is not None and parse(name).pieces is not None:
        return False
    return misfit(name, layout.world_size, size, layout, layout, case.pieces) is None


def _best_of_families(ranked: Sequence[str]) -> list[str]:
    """Return the first member of each family, of the first `MOST` families, in the order of the registry."""
    first: dict[str, str] = {}
    for name in ranked:
        first.setdefault(parse(name).family.name, name)
    chosen = dict(list(first.items())[:MOST])
    return [chosen[family] for family in FAMILIES if family in chosen]
