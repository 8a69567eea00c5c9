"""The predicted time of a call as an engine runs it, for `tokenring advise` and its benchmark.

A choice is priced as the schedule of ours that moves the same blocks, with what is true of engines and not of us: how
they merge partial results, that they gather across hosts by a collective, and that some gather what others send round a
ring. All that is priced, ours too, has the rates of its head dim and mask (`flash_shapes`).
"""

from __future__ import annotations

from collections.abc import Iterator
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

GATHER, USP = "all-gather-kv", "usp/"
OUR_BYTES, OUR_OPERATORS = 12, 1  # of a merge: both fp32 results are read and one is written, counted as one operation


@dataclass(frozen=True)
class Merging:
    """The way in which an engine merges a tile's result into those before it, forward.

    nbytes: that its operators read and write for each element of the output, one after another. operators: so many.
    gathered: its ring is an all-gather, of which one owner's block at a time is computed and merged, as of a ring.
    beside_first: the rank's own block is computed while that gather is on its way.
    """

    nbytes: int
    operators: int
    gathered: bool = False
    beside_first: bool = False


FUSED = Merging(OUR_BYTES, OUR_OPERATORS)
# out - sigmoid(block_lse - lse) * (out - block_out) on an fp32 accumulator, operator by operator: to fp32 (6 bytes),
# the difference (12), its product (8), the difference again (12); and five on log-sum-exps, small beside these. So
# read ring-flash-attention and yunchang (utils.py), vllm-omni (ring_utils.py), torch's _SDPAMerger, and diffusers.
BY_OPERATORS = Merging(38, 9)
# torch 2.13, _context_parallel/_attention.py: _AllGatherRotater begins one all-gather (285-291) before the own block is
# computed (429-482), and waits for it before the second (293-300). xDiT 175e0bf calls that for its ring and for Ulysses
# x ring (usp.py:48-73, 331-340), after all-to-alls that it waits for at once (84-89).
BY_OPERATORS_GATHERED = replace(BY_OPERATORS, gathered=True, beside_first=True)
# diffusers 58eb52c, attention_dispatch.py: an all-gather that `chunk` waits for, as it is no view (2381-2382), then one
# block after another (2384-2418); so is Ulysses x ring (2834-2861), after all-to-alls that it waits for at once (2102).
BY_OPERATORS_WAITED = replace(BY_OPERATORS, gathered=True)


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
    gathered = merging.gathered and (schedule == GATHER or schedule.startswith(USP))
    beside = _merged_seconds(call, schedule, merging) if gathered else 0.0
    call = _with_merging(call, merging)
    try:
        if gathered:
            return sum(_by_blocks(call, schedule, merging)) + beside
        return predict(_made(call, schedule), call.setting).seconds
    except ConfigurationError:
        found = forecast_call(replace(call, families=(schedule,))).candidates[0].predicted_seconds
        if found is None:
            raise
        return found + beside


def _by_blocks(call: CallToPlan, schedule: str, merging: Merging) -> Iterator[float]:
    """Yield the seconds of each pass that gathers first and then computes one owner's block after another.

    What moves, as of a schedule that computes when all has come; and kernels as of the ring, which calls one for each
    block.
    """
    together, ring = _made(call, schedule, together=True), make(call, "ring" if schedule == GATHER else schedule)
    for direction in call.setting.passes:
        one = replace(call.setting, passes=(direction,))
        found, kernels = predict(together, one), predict(ring, one).compute_seconds
        moving = found.seconds - found.compute_seconds
        hidden = min(moving * _gathered_share(call, schedule), kernels / _blocks(call, schedule))
        yield moving + kernels - (hidden if merging.beside_first else 0.0)


def _blocks(call: CallToPlan, schedule: str) -> int:
    """Return how many owners' blocks a rank computes, one after another."""
    world = call.setting.interconnect.world_size
    return world if schedule == GATHER else world // int(schedule.removeprefix(USP))


def _gathered_share(call: CallToPlan, schedule: str) -> float:
    """Return the part of a rank's bytes that it gathers: of Ulysses x ring the others are exchanged before."""
    size, blocks = call.setting.workload, _blocks(call, schedule)
    kv, q_and_out = size.kv_heads * size.kv_dim, size.q_heads * size.qo_dim
    gathered, others = (blocks - 1) * kv, 1 - blocks / call.setting.interconnect.world_size
    return gathered / (gathered + others * (kv + q_and_out))


def _made(call: CallToPlan, schedule: str, together: bool = False) -> Schedule:
    """Return the schedule of a choice, or of what it gathers before it computes.

    Of a gather over several hosts one in which blocks cross to each host once, as NCCL's do.
    """
    net = call.setting.interconnect
    size, several = node_sizes(net)[0], len(set(net.hosts)) > 1
    gathers = schedule == GATHER and several and size < net.world_size
    name = f"relay/{size}" if gathers else schedule
    if not together and not gathers:
        return make(call, schedule)
    scheme, order = replace(parse(name).make(net.world_size), together=True), order_of(net)
    return build(scheme if order is None else arranged(scheme, order), call.q_layout, call.kv_layout, call.mask)


def _with_merging(call: CallToPlan, merging: Merging) -> CallToPlan:
    """Return the call on a machine on which a merge takes what it takes in the engine."""
    machine = call.setting.machine
    rates = reshaped(
        machine.rates, merge_factor=merging.nbytes / OUR_BYTES, merge_operators=merging.operators
    )  # fmt: skip
    return replace(call, setting=replace(call.setting, machine=replace(machine, rates=rates)))


def _merged_seconds(call: CallToPlan, schedule: str, merging: Merging) -> float:
    """Return what merging takes where gathered blocks are computed one owner's at a time: our schedule computes all.

    Of the rank that has most to merge, which merges results of all of its rows.
    """
    if "forward" not in call.setting.passes:
        return 0.0
    size, world, rates = call.setting.workload, call.setting.interconnect.world_size, call.setting.machine.rates
    nbytes = merging.nbytes * size.batch * size.q_length / world * size.q_heads * size.value_dim
    return (_blocks(call, schedule) - 1) * (rates.copy_seconds(nbytes) + (merging.operators - 1) * rates.op_seconds)
