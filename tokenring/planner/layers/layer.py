"""The operators of one transformer layer over a mesh of ranks (tp × cp), with the schedules chosen for all of them.

Rank r of the job is rank r % tp of its tensor-parallel group, whose ranks are neighbours, and r // tp of its
context-parallel group. Groups of one kind work at the same time, groups of the two kinds one after the other. So each
operator is simulated on the wires that are left for its group while all groups of that kind exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tokenring.errors import ConfigurationError
from tokenring.lowering.footprint import link_bytes
from tokenring.planner.choosing.linear import CANDIDATES, FEW_RANKS, LEAST_GAIN, RankedSchedule, ranked, unfused_seconds
from tokenring.planner.simulation.predict import Setting, least_seconds, predict
from tokenring.sequence.workload import Workload

if TYPE_CHECKING:
    import torch

    from tokenring.ir.schedule_data import Pass
    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.schedule.schedule import Schedule
    from tokenring.tables.rates import Machine

QKV, ATTENTION, OUT, UP, DOWN = "qkv", "attention", "out", "up", "down"
ORDER = (QKV, ATTENTION, OUT, UP, DOWN)  # of forward; backward goes the other way
KIND = {QKV: "column", ATTENTION: "attention", OUT: "row", UP: "column", DOWN: "row"}
# A column layer and the row layer after it, with what may stay where it is. Attention between the first two takes a
# rank's own heads of all tokens of its tensor-parallel group: only the weights can stay.
PAIRS = ((QKV, OUT, ("weights",)), (UP, DOWN, ("weights", "tokens")))
COLLECTIVES = ("tokenring", "direct-q")  # by which an unfused layer gathers and reduces: over a ring, or direct


@dataclass(frozen=True)
class LinearLayers:
    """The linear layers of a transformer layer, on one tensor-parallel group.

    net: what the group has of the wires. machine: at its rates of products. tokens: of the group, of all samples.
    width: elements of a token. features: of each layer by its name, on all ranks of the group.
    """

    net: Interconnect
    machine: Machine
    tokens: int
    width: int
    features: Mapping[str, int]
    dtype: torch.dtype

    def setting(self, name: str, passes: tuple[Pass, ...]) -> Setting:
        """Return the setting of a layer: rows as q, columns as kv."""
        size = Workload(1, self.tokens, self.features[name], 1, 1, self.width, self.dtype)
        return Setting(size, self.net, self.machine, passes)


class LayerCall(NamedTuple):
    """The layer that is planned for.

    attention: the setting of one context-parallel group, with a rank's share of the heads. schedule: of attention.
    """

    attention: Setting
    schedule: Schedule
    linears: LinearLayers

    def linear(self, name: str) -> Setting:
        """Return the setting of a linear layer, with the passes of attention."""
        return self.linears.setting(name, self.attention.passes)


class OperatorCost(NamedTuple):
    """One pass of one operator of a layer.

    compute_seconds: kernels of the rank that computes longest. exposed_seconds: beyond the busiest rank's own work.
    sent_bytes: of the rank that sends most. unfused_seconds: where collectives and products follow one another, by the
    schedule of the collectives; empty of attention, and where a group is one rank.
    """

    operator: str
    direction: Pass
    schedule: str
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    sent_bytes: int
    unfused_seconds: Mapping[str, float]

    @property
    def kind(self) -> str:
        """Return the kind of operator: column, row or attention."""
        return KIND[self.operator]

    def unfused(self, by: str) -> float:
        """Return the seconds unfused, its collectives by this schedule; of what has no such form, as it is."""
        return self.unfused_seconds.get(by, self.seconds)


@dataclass(frozen=True)
class LayerPlan:
    """The schedules of a layer's operators, and what each pass of each costs, in the order in which they run.

    stays: of the column layer of each pair, what stays. pair_seconds: of each pair, all passes of both layers, by what
    stays.
    """

    costs: tuple[OperatorCost, ...]
    stays: Mapping[str, str]
    pair_seconds: Mapping[str, Mapping[str, float]]

    @property
    def seconds(self) -> float:
        """Seconds of all operators, one after another."""
        return sum(each.seconds for each in self.costs)

    @property
    def compute_seconds(self) -> float:
        """Seconds of the kernels."""
        return sum(each.compute_seconds for each in self.costs)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that no rank's own work hides."""
        return sum(each.exposed_seconds for each in self.costs)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends at most: of each operator those of its busiest rank."""
        return sum(each.sent_bytes for each in self.costs)

    def unfused_seconds(self, by: str) -> float:
        """Return the seconds with linear layers unfused, and attention as it is."""
        return sum(each.unfused(by) for each in self.costs)

    def schedule_of(self, operator: str) -> str:
        """Return the name of an operator's schedule, which is one for both passes."""
        return next(each.schedule for each in self.costs if each.operator == operator)


def plan_layer(call: LayerCall) -> LayerPlan:
    """Return the schedules of a layer whose attention is planned. Raises ConfigurationError where nothing fits."""
    chosen: dict[str, list[RankedSchedule]] = {}
    stays, pair_seconds = {}, {}
    for column, row, kinds in PAIRS:
        found = _placed(call, column, row, kinds)
        pair_seconds[column] = {kind: _both(*layers) for kind, layers in found.items()}
        first, best = next(iter(found)), min(found, key=pair_seconds[column].__getitem__)
        gains = pair_seconds[column][best] < pair_seconds[column][first] * (1 - LEAST_GAIN)
        stays[column] = best if gains else first
        chosen[column], chosen[row] = found[stays[column]]
    passes = call.attention.passes
    costs = [
        _cost(call, name, direction, chosen)
        for direction in passes
        for name in (ORDER if direction == "forward" else reversed(ORDER))
    ]
    return LayerPlan(tuple(costs), stays, pair_seconds)


def _placed(
    call: LayerCall, column: str, row: str, kinds: tuple[str, ...]
) -> dict[str, tuple[list[RankedSchedule], list[RankedSchedule]]]:
    """Return the schedules of two layers that share a tensor, by what stays in both: so it lies where both want it.

    Raises ConfigurationError where no schedule fits both.
    """
    found, reasons = {}, []
    for kind in kinds:
        names = [name for name in CANDIDATES[kind] if "/pieces" not in name or call.linears.net.world_size <= FEW_RANKS]
        try:
            found[kind] = ranked("column", call.linear(column), names), ranked("row", call.linear(row), names)
        except ConfigurationError as error:
            reasons.append(str(error))
    if not found:
        raise ConfigurationError(f"nothing fits both {column} and {row}: {'; '.join(reasons)}")
    return found


def _both(column: list[RankedSchedule], row: list[RankedSchedule]) -> float:
    return column[0].prediction.seconds + row[0].prediction.seconds


def _cost(call: LayerCall, name: str, direction: Pass, chosen: Mapping[str, list[RankedSchedule]]) -> OperatorCost:
    whole = call.attention if name == ATTENTION else call.linear(name)
    setting = replace(whole, passes=(direction,))
    schedule = call.schedule if name == ATTENTION else chosen[name][0].schedule
    found = predict(schedule, setting)
    sent = dict.fromkeys(range(schedule.world_size), 0)
    for (src, _), nbytes in link_bytes(schedule, setting.workload, direction).items():
        sent[src] += nbytes
    unfused = {} if name == ATTENTION or schedule.world_size == 1 else dict(_unfused(name, setting, chosen[name]))
    return OperatorCost(
        name, direction, schedule.name, found.seconds, found.compute_seconds, found.exposed_seconds,
        max(sent.values()), unfused,
    )  # fmt: skip


def _unfused(name: str, setting: Setting, found: list[RankedSchedule]) -> Iterator[tuple[str, float]]:
    """Yield schedules of collectives, and a layer's seconds by each, with the fastest products of all schedules."""
    computing = min(least_seconds(each.schedule, setting).kernel_seconds for each in found)
    for by in COLLECTIVES:
        yield by, unfused_seconds(KIND[name], setting, by, computing)
