"""A plan as text: a ranked table, and one schedule explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from tokenring.cli.plan.options import Asked
from tokenring.cli.spelling import heads_text
from tokenring.display.safe_text import plain
from tokenring.display.units import mb_text, time_text
from tokenring.errors import ConfigurationError
from tokenring.lowering.target import Target
from tokenring.planner.bounds.bound import Bound
from tokenring.planner.choosing.auto import CallToPlan, forecast_call, is_folded, make
from tokenring.planner.choosing.candidates import BASELINE, Candidate, over_limit
from tokenring.planner.choosing.candidates import table as candidate_table
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.planner.choosing.select import connected, wires_need
from tokenring.planner.simulation.predict import Prediction, predict
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.workload import Workload

MOST_OF_A_MASK = 160  # characters that a heading shows
ONE_CALL = "one attention call (of one layer)"


def table(plan: Plan | Forecast, asked: Asked, candidates: Sequence[Candidate], everything: bool = False) -> str:
    """Return the candidates as a table, best first, with why each loses. candidates: the plan's, with the baseline."""
    rows, says = candidate_table(candidates, everything, "; --all shows them")
    lines = [heading(asked), plan.reason, "", *rows]
    best, others = candidates[0], [each for each in candidates if each.predicted_seconds is None]
    if best.connections:
        over = asked.call.in_mode(plan.transport).setting.target
        lines.append(connections_text(best.name, best.connections, best.connection_bytes or 0, over))
    if others and everything:
        lines += ["", "not simulated"] + [f"  {each.name}: {each.reason}" for each in others]
    elif others:
        lines.append(f"{len(others)} more cannot win or do not fit; --all says why")
    return "\n".join([*lines, *says])


def with_baseline(plan: Plan | Forecast, call: CallToPlan) -> list[Candidate]:
    """Return the plan's candidates, with a plain ring simulated in any case: everybody knows it."""
    found = [each for each in plan.candidates if each.name != BASELINE or each.predicted_seconds is not None]
    if any(each.name == BASELINE for each in found):
        return found
    try:
        ring = _ring(call, plan)
    except ConfigurationError as error:  # of connections that the transport may not have
        ring = Candidate(BASELINE, None, None, None, None, None, None, f"does not fit: {error}")
    # By its time, behind the plan, which stays first; without one, or where it does not fit, behind all simulated.
    limit = inf if call.memory_limit_bytes is None else call.memory_limit_bytes
    last = inf if ring.predicted_seconds is None or (ring.peak_bytes or 0) > limit else ring.predicted_seconds
    at = 1 + sum(each.predicted_seconds is not None and each.predicted_seconds <= last for each in found[1:])
    return [*found[:at], ring, *found[at:]]


def _ring(call: CallToPlan, plan: Plan | Forecast) -> Candidate:
    best, limit = plan.candidates[0], call.memory_limit_bytes
    folded = isinstance(plan, Forecast) or is_folded(call)
    if folded:
        only = replace(call, families=(BASELINE,), memory_limit_bytes=None, modes={})
        found = forecast_call(only).candidates[0]
    else:
        ring = predict(make(call, BASELINE), call.setting)
        cost = ring.seconds, ring.compute_seconds, ring.exposed_seconds, ring.wires.worst_bytes, ring.peak_bytes
        why, of = wires_need(ring.wires), connected(ring.connections, ring.connection_bytes)
        found = Candidate(BASELINE, *cost, best.bound_seconds, why, *of)
    if limit is not None and (found.peak_bytes or 0) > limit:
        why = over_limit(found.peak_bytes or 0, limit)
    else:
        slower = (found.predicted_seconds or 0.0) / (best.predicted_seconds or 1.0) - 1
        why = f"{slower:+.0%}" + ("" if folded else f": {found.reason}")
    return replace(found, reason=why)


def connections_text(name: str, connections: int, connection_bytes: int, over: Target) -> str:
    """Return the sentence that says how much of a schedule's memory is of its connections, over such a transport."""
    of = "two ranks or of all that exchange" if over.collectives else "all ranks" if over.batching else "two ranks"
    count = f"{connections} communicator{'s' if connections > 1 else ''}"
    return f"of the memory of {name}, {mb_text(connection_bytes)} are those of {count} of {of}"


def heading(asked: Asked) -> str:
    """Return the lines that say for what call and machine the plan is."""
    setting = asked.call.setting
    passes = " + ".join(setting.passes)
    text = f"{ONE_CALL}, {passes}: {workload_text(setting.workload)}, {plain(str(asked.call.mask), MOST_OF_A_MASK)}, "
    text += f"layout {asked.call.q_layout.name}"
    tensor = f" (tensor parallelism {asked.tensor_parallel})" if asked.tensor_parallel > 1 else ""
    net = setting.interconnect
    lines = [text, f"on {net.name}: {net.world_size} ranks{tensor}; {setting.machine.source}"]
    links = min(net.own_links(rank) for rank in range(net.local or net.world_size))  # hosts are alike
    if links > 1:
        lines.append(f"a ring uses 1 of the {links} links of each rank; direct schedules use all of them")
    return "\n".join(lines)


def workload_text(workload: Workload) -> str:
    """Describe a workload: batch 1, 4,096 tokens, 8:8 heads × 64, bfloat16."""
    dims = heads_text(workload.head_dim, workload.value_dim)
    heads = f"{workload.q_heads}:{workload.kv_heads} heads × {dims}"
    dtype = str(workload.dtype).removeprefix("torch.")
    return f"batch {workload.batch}, {workload.q_length:,} tokens, {heads}, {dtype}"


def explained(name: str, schedule: Schedule, found: Prediction, asked: Asked, bound: Bound) -> str:
    """Explain one schedule: where its time goes, pass by pass, and what its busiest wires carry."""
    setting = asked.call.setting
    lines = [
        heading(asked),
        "",
        f"{name}: {time_text(found.seconds)}, {found.seconds / bound.seconds:.2f} × the lower bound",
    ]
    lines.append(
        f"lower bound {time_text(bound.seconds)}: compute {time_text(bound.compute_seconds)}, "
        f"transfers {time_text(bound.transfer_seconds)} (into {bound.cut})"
    )
    lines.append(f"memory {mb_text(found.peak_bytes)} a rank for buffers and what is kept")
    if found.connection_bytes:
        lines.append(connections_text(name, found.connections, found.connection_bytes, setting.target))
    for direction, outcome in zip(setting.passes, found.outcomes, strict=True):
        busiest = max(range(schedule.world_size), key=lambda rank: outcome.busy_seconds[rank])
        lines.append(
            f"{direction}: {time_text(outcome.seconds)}, of which rank {busiest} is busy "
            f"{time_text(outcome.busy_seconds[busiest])}"
        )
        loads = sorted(
            outcome.wire_bytes.items(), key=lambda item: (-item[1] / setting.interconnect.gbs(item[0]), item[0])
        )
        for wire, nbytes in loads[:5]:
            gbs = setting.interconnect.gbs(wire)
            lines.append(
                f"  {wire}: {mb_text(round(nbytes))} at {gbs:.4g} GB/s, {time_text(nbytes / gbs / 1e9)}, "
                f"{nbytes / gbs / 1e9 / outcome.seconds:.0%} of the time"
            )
    return "\n".join(lines)
