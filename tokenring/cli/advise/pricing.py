"""The predicted time of a call as an engine runs it, for `tokenring advise` and its benchmark.

A choice is priced as the schedule of ours that moves the same blocks, with what is true of engines and not of us: how
they merge partial results, and that they gather across hosts by a collective. All that is priced, ours too, has the
rates of its head dim and mask (`flash_shapes`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.auto import CallToPlan, forecast_call, make, order_of
from tokenring.planner.interconnects.rank_order import node_sizes
from tokenring.planner.machines.flash_shapes import shaped
from tokenring.planner.simulation.predict import predict
from tokenring.schedule.families.change import arranged
from tokenring.schedule.families.registry import parse
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import build
from tokenring.tables.shaped_rates import reshaped

GATHER = "all-gather-kv"
OUR_BYTES, OUR_OPERATORS = 12, 1  # of a merge: both fp32 results are read and one is written, counted as one operation


@dataclass(frozen=True)
class Merging:
    """The way in which an engine merges a tile's result into those before it, forward.

    nbytes: that its operators read and write for each element of the output, one after another. operators: so many.
    gathered: what an all-gather brings is computed one owner's block at a time, and merged as a ring's.
    """

    nbytes: int
    operators: int
    gathered: bool = False


FUSED = Merging(OUR_BYTES, OUR_OPERATORS)
# out - sigmoid(block_lse - lse) * (out - block_out) on an fp32 accumulator, operator by operator: to fp32 (6 bytes),
# the difference (12), its product (8), the difference again (12); and five on log-sum-exps, small beside these. So
# read ring-flash-attention and yunchang (utils.py), vllm-omni (ring_utils.py), torch's _SDPAMerger, and diffusers.
BY_OPERATORS = Merging(38, 9)
BY_OPERATORS_GATHERED = replace(BY_OPERATORS, gathered=True)


def as_run(call: CallToPlan) -> CallToPlan:
    """Return a call with the rates of its head dim and mask, where they are known: for engines' choices and ours."""
    setting = call.setting
    return replace(call, setting=replace(setting, machine=shaped(setting.machine, setting.workload)))


def with_heads(call: CallToPlan, heads: tuple[int, int] | None) -> CallToPlan:
    """Return a call with other heads of q and kv, as of an engine that pads or repeats them; None: as it is."""
    if heads is None:
        return call
    workload = replace(call.setting.workload, q_heads=heads[0], kv_heads=heads[1])
    return replace(call, setting=replace(call.setting, workload=workload))


def choice_seconds(call: CallToPlan, schedule: str, merging: Merging = FUSED) -> float:
    """Return the predicted seconds of a call, as of `as_run`, by the schedule that moves a choice's blocks.

    Raises ConfigurationError if the schedule does not fit the call.
    """
    beside = _gathered_seconds(call, merging) if schedule == GATHER else 0.0
    call = _with_merging(call, merging)
    try:
        return predict(_made(call, schedule), call.setting).seconds + beside
    except ConfigurationError:
        found = forecast_call(replace(call, families=(schedule,))).candidates[0].predicted_seconds
        if found is None:
            raise
        return found + beside


def _made(call: CallToPlan, schedule: str) -> Schedule:
    """Return the schedule; of a gather over several hosts one in which blocks cross to each host once, as NCCL's do."""
    net = call.setting.interconnect
    size, several = node_sizes(net)[0], len(set(net.hosts)) > 1
    if schedule != GATHER or not several or size == net.world_size:
        return make(call, schedule)
    scheme, order = replace(parse(f"relay/{size}").make(net.world_size), together=True), order_of(net)
    return build(scheme if order is None else arranged(scheme, order), call.q_layout, call.kv_layout, call.mask)


def _with_merging(call: CallToPlan, merging: Merging) -> CallToPlan:
    """Return the call on a machine on which a merge takes what it takes in the engine."""
    machine = call.setting.machine
    rates = reshaped(
        machine.rates, merge_factor=merging.nbytes / OUR_BYTES, merge_operators=merging.operators
    )  # fmt: skip
    return replace(call, setting=replace(call.setting, machine=replace(machine, rates=rates)))


def _gathered_seconds(call: CallToPlan, merging: Merging) -> float:
    """Return what merging takes where gathered blocks are computed one owner's at a time: our schedule computes all.

    Of the rank that has most to merge, which merges results of all of its rows.
    """
    if not merging.gathered or "forward" not in call.setting.passes:
        return 0.0
    size, world, rates = call.setting.workload, call.setting.interconnect.world_size, call.setting.machine.rates
    nbytes = merging.nbytes * size.batch * size.q_length / world * size.q_heads * size.value_dim
    return (world - 1) * (rates.copy_seconds(nbytes) + (merging.operators - 1) * rates.op_seconds)
